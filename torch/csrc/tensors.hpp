// Tensors in kolo's terms: elements of a type in contiguous memory.

#pragma once

#include <ATen/ATen.h>
#include <kolo.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace torch_kolo {

// A type of kolo, and how many of its elements make one element of the tensor.
struct Elements {
  kolo_dtype_t dtype;
  size_t factor;
};

// Returns the type for operations that only move elements: any type, if necessary as bytes.
Elements moved(at::ScalarType type);

// Returns the type for a reduction. Throws a ValueError if kolo does not have this reduction of the
// type.
struct Reduction {
  Elements elements;
  kolo_redop_t op;
};
Reduction reduced(at::ScalarType type, const c10d::ReduceOp& op, const char* call);

// Multiplies tensors by the factor of a PREMUL_SUM, in place. Other reductions have none.
void premultiply(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);
// Returns the tensors, or for a PREMUL_SUM their products with its factor.
std::vector<at::Tensor> premultiplied(std::vector<at::Tensor> tensors, const c10d::ReduceOp& op);

// Whether the elements are in memory in their order, without gaps or lazy conversions.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Throws a ValueError unless the tensor is dense and on the host or a CUDA device.
void check_dense(const at::Tensor& tensor, const char* call);
// The same for a tensor that is written.
void check_writable(const at::Tensor& tensor, const char* call);
void check_same_type(const at::Tensor& one, const at::Tensor& other, const char* call);

// Whether two contiguous tensors share memory.
bool overlap(const at::Tensor& one, const at::Tensor& other);

} // namespace torch_kolo
