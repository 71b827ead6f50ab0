#include "tensors.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <optional>

namespace torch_kolo {

namespace {

std::optional<kolo_dtype_t> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return KOLO_INT8;
    case at::kByte:
      return KOLO_UINT8;
    case at::kShort:
      return KOLO_INT16;
    case at::kUInt16:
      return KOLO_UINT16;
    case at::kInt:
      return KOLO_INT32;
    case at::kUInt32:
      return KOLO_UINT32;
    case at::kLong:
      return KOLO_INT64;
    case at::kUInt64:
      return KOLO_UINT64;
    case at::kHalf:
      return KOLO_FLOAT16;
    case at::kBFloat16:
      return KOLO_BFLOAT16;
    case at::kFloat:
      return KOLO_FLOAT32;
    case at::kDouble:
      return KOLO_FLOAT64;
    case at::kBool:
      return KOLO_BOOL;
    case at::kFloat8_e4m3fn:
      return KOLO_FLOAT8_E4M3;
    case at::kFloat8_e5m2:
      return KOLO_FLOAT8_E5M2;
    default:
      return std::nullopt;
  }
}

const char* name_of(c10d::ReduceOp::RedOpType op) {
  constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return static_cast<size_t>(op) < std::size(names) ? names[op] : "an unknown reduction";
}

std::optional<kolo_redop_t> redop_of(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    // The elements are multiplied first: see `premultiply`.
    case c10d::ReduceOp::PREMUL_SUM:
      return KOLO_SUM;
    case c10d::ReduceOp::AVG:
      return KOLO_AVG;
    case c10d::ReduceOp::PRODUCT:
      return KOLO_PROD;
    case c10d::ReduceOp::MIN:
      return KOLO_MIN;
    case c10d::ReduceOp::MAX:
      return KOLO_MAX;
    case c10d::ReduceOp::BAND:
      return KOLO_BAND;
    case c10d::ReduceOp::BOR:
      return KOLO_BOR;
    case c10d::ReduceOp::BXOR:
      return KOLO_BXOR;
    default:
      return std::nullopt;
  }
}

} // namespace

Elements moved(at::ScalarType type) {
  if (const auto dtype = dtype_of(type)) {
    return {*dtype, 1};
  }
  return {KOLO_UINT8, c10::elementSize(type)};
}

Reduction reduced(at::ScalarType type, const c10d::ReduceOp& op, const char* call) {
  using Op = c10d::ReduceOp;
  const Op::RedOpType which = op;
  const auto redop = redop_of(which);
  TORCH_CHECK_VALUE(redop.has_value(), call, ": the kolo backend has no ReduceOp.", name_of(which));
  if (c10::isComplexType(type)) {
    TORCH_CHECK_VALUE(
        which == Op::SUM || which == Op::AVG || which == Op::PREMUL_SUM, call, ": there is no ReduceOp.", name_of(which),
        " of complex numbers, only SUM, AVG and PREMUL_SUM");
    return {{*dtype_of(c10::toRealValueType(type)), 2}, *redop};
  }
  const auto dtype = dtype_of(type);
  TORCH_CHECK_VALUE(
      dtype.has_value(), call, ": the kolo backend does not reduce tensors of ", type,
      "; convert them first, or move them with a collective that does not reduce");
  TORCH_CHECK_VALUE(
      c10::isFloatingType(type) || which != Op::PREMUL_SUM, call,
      ": ReduceOp.PREMUL_SUM is for floating point and complex numbers, and this is a tensor of ", type);
  TORCH_CHECK_VALUE(
      !c10::isFloat8Type(type) || which != Op::PREMUL_SUM, call, ": PyTorch cannot multiply tensors of ", type,
      ", which ReduceOp.PREMUL_SUM needs; convert them first");
  if (type == at::kBool) {
    TORCH_CHECK_VALUE(which != Op::AVG, call, ": there is no ReduceOp.AVG of bool; convert the tensor to floating point first");
    return {{KOLO_BOOL, 1}, which == Op::SUM ? KOLO_BOR : which == Op::PRODUCT ? KOLO_BAND : *redop};
  }
  const bool is_float = c10::isFloatingType(type);
  TORCH_CHECK_VALUE(
      is_float || which != Op::AVG, call, ": ReduceOp.AVG is for floating point, and this is a tensor of ", type,
      "; use SUM and divide with the rounding that you want");
  const bool is_bitwise = which == Op::BAND || which == Op::BOR || which == Op::BXOR;
  TORCH_CHECK_VALUE(
      !is_float || !is_bitwise, call, ": ReduceOp.", name_of(which), " is for integers and bool, and this is a tensor of ", type);
  return {{*dtype, 1}, *redop};
}

void premultiply(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& supplement = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
  for (at::Tensor tensor : tensors) {
    if (supplement.tensor_factor.defined()) {
      // Without a dimension, the factor changes neither the shape nor the type of the product.
      tensor.mul_(supplement.tensor_factor.reshape({}));
    } else {
      tensor.mul_(supplement.double_factor);
    }
  }
}

std::vector<at::Tensor> premultiplied(std::vector<at::Tensor> tensors, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return tensors;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (auto& tensor : tensors) {
    tensor = tensor.clone();
  }
  premultiply(tensors, op);
  return tensors;
}

void check_dense(const at::Tensor& tensor, const char* call) {
  TORCH_CHECK_VALUE(tensor.defined(), call, ": a tensor is undefined");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, call, ": the tensor is ", tensor.layout(),
      "; the kolo backend takes dense tensors, and sparse COO ones for all_reduce");
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() || tensor.device().is_cuda(), call, ": the kolo backend does not support tensors on ", tensor.device());
  TORCH_CHECK_VALUE(!tensor.is_quantized(), call, ": the kolo backend does not support quantized tensors; dequantize them first");
}

void check_writable(const at::Tensor& tensor, const char* call) {
  check_dense(tensor, call);
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes, call,
      ": elements of a tensor that is written share memory (as after expand); clone() it first");
}

void check_same_type(const at::Tensor& one, const at::Tensor& other, const char* call) {
  TORCH_CHECK_VALUE(
      one.scalar_type() == other.scalar_type(), call, ": tensors of ", one.scalar_type(), " and of ", other.scalar_type(),
      " in one call; all must have the same type");
  TORCH_CHECK_VALUE(
      one.device() == other.device(), call, ": tensors on ", one.device(), " and on ", other.device(),
      " in one call; all must be on the same device");
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto* a = static_cast<const char*>(one.const_data_ptr());
  const auto* b = static_cast<const char*>(other.const_data_ptr());
  return a < b + other.nbytes() && b < a + one.nbytes();
}

} // namespace torch_kolo
