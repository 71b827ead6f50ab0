// Tensors as kolo sees them: elements of a type, in contiguous memory.

#pragma once

#include <ATen/ATen.h>
#include <kolo.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace torch_kolo {

// A type of kolo's, and how many of its elements make one of the tensor's.
struct Elements {
  kolo_dtype_t dtype;
  size_t factor;
};

// For operations that move elements and do not look at them: any type, if need be as bytes.
Elements moved(at::ScalarType type);

// For reductions. A ValueError if kolo cannot reduce such elements so.
struct Reduction {
  Elements elements;
  kolo_redop_t op;
};
Reduction reduced(at::ScalarType type, const c10d::ReduceOp& op, const char* call);

// Whether its elements are in memory as they are, in their order.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// A ValueError unless it is a dense tensor on the host or on a CUDA device.
void check_dense(const at::Tensor& tensor, const char* call);
// The same, for a tensor that is written.
void check_writable(const at::Tensor& tensor, const char* call);
void check_same_type(const at::Tensor& one, const at::Tensor& other, const char* call);

// Whether two contiguous tensors have memory in common.
bool overlap(const at::Tensor& one, const at::Tensor& other);

} // namespace torch_kolo
