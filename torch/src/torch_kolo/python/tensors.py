"""Tensors in kolo's terms: elements of a type in contiguous memory."""

from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from . import library

TYPES = {
    torch.int8: library.INT8,
    torch.uint8: library.UINT8,
    torch.int16: library.INT16,
    torch.int32: library.INT32,
    torch.int64: library.INT64,
    torch.float16: library.FLOAT16,
    torch.bfloat16: library.BFLOAT16,
    torch.float32: library.FLOAT32,
    torch.float64: library.FLOAT64,
    torch.bool: library.BOOL,
    torch.float8_e4m3fn: library.FLOAT8_E4M3,
    torch.float8_e5m2: library.FLOAT8_E5M2,
}
for _name, _code in (("uint16", library.UINT16), ("uint32", library.UINT32), ("uint64", library.UINT64)):
    # PyTorch has them since 2.3.
    if hasattr(torch, _name):
        TYPES[getattr(torch, _name)] = _code

REDUCTIONS = {
    ReduceOp.SUM: library.SUM,
    ReduceOp.AVG: library.AVG,
    ReduceOp.PRODUCT: library.PROD,
    ReduceOp.MIN: library.MIN,
    ReduceOp.MAX: library.MAX,
    ReduceOp.BAND: library.BAND,
    ReduceOp.BOR: library.BOR,
    ReduceOp.BXOR: library.BXOR,
    # The elements are multiplied first: see `premultiply`.
    ReduceOp.RedOpType.PREMUL_SUM: library.SUM,
}

# The parts of a complex number.
REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


class Elements(NamedTuple):
    """A type of kolo, and how many of its elements make one element of the tensor."""

    type: int
    factor: int


class Reduction(NamedTuple):
    type: int
    factor: int
    op: int
    # Whether `premultiply` comes first.
    premultiplies: bool


def moved(dtype):
    """The type for operations that only move elements: any type, if necessary as bytes."""
    code = TYPES.get(dtype)
    return Elements(library.UINT8, dtype.itemsize) if code is None else Elements(code, 1)


def premultiply(tensors, op):
    """Multiplies tensors by the factor of a PREMUL_SUM, in place. Other reductions have none."""
    if op.op == ReduceOp.RedOpType.PREMUL_SUM:
        factor = factor_of(op)
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(factor)


def premultiplied(tensors, op):
    """The tensors, or for a PREMUL_SUM their products with its factor."""
    if op.op != ReduceOp.RedOpType.PREMUL_SUM:
        return tensors
    factor = factor_of(op)
    with torch.no_grad():
        return [torch.mul(tensor, factor) for tensor in tensors]


def factor_of(op):
    _, factor = op.__getstate__()
    # Without a dimension, it changes neither the shape nor the type of a product.
    return factor.reshape(()) if isinstance(factor, torch.Tensor) else factor


_reductions = {}


def reduced(dtype, op, call):
    """The type for a reduction. Raises a ValueError if kolo does not have this reduction of the
    type.
    """
    # The comparison takes a third of the time of the number.
    kind = 0 if op == ReduceOp.SUM else int(op.op)
    found = _reductions.get((dtype, kind))
    if found is None:
        found = _reductions[dtype, kind] = Reduction(*_reduced(dtype, op.op, call), op.op == ReduceOp.RedOpType.PREMUL_SUM)
    return found


def _reduced(dtype, op, call):
    code = REDUCTIONS.get(op)
    if code is None:
        raise ValueError(f"{call}: the kolo backend has no ReduceOp.{op.name}.")
    if dtype.is_complex:
        if op not in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.RedOpType.PREMUL_SUM):
            raise ValueError(f"{call}: there is no ReduceOp.{op.name} of complex numbers, only SUM, AVG and PREMUL_SUM")
        return TYPES[REAL[dtype]], 2, code
    if dtype not in TYPES:
        raise ValueError(
            f"{call}: the kolo backend does not reduce tensors of {dtype}; convert them first, or move them with a collective that does not reduce"
        )
    if op == ReduceOp.RedOpType.PREMUL_SUM and not dtype.is_floating_point:
        raise ValueError(f"{call}: ReduceOp.PREMUL_SUM is for floating point and complex numbers, and this is a tensor of {dtype}")
    if op == ReduceOp.RedOpType.PREMUL_SUM and dtype.itemsize == 1:
        raise ValueError(f"{call}: PyTorch cannot multiply tensors of {dtype}, which ReduceOp.PREMUL_SUM needs; convert them first")
    if dtype == torch.bool:
        if op == ReduceOp.AVG:
            raise ValueError(f"{call}: there is no ReduceOp.AVG of bool; convert the tensor to floating point first")
        return library.BOOL, 1, {ReduceOp.SUM: library.BOR, ReduceOp.PRODUCT: library.BAND}.get(op, code)
    if op == ReduceOp.AVG and not dtype.is_floating_point:
        raise ValueError(
            f"{call}: ReduceOp.AVG is for floating point, and this is a tensor of {dtype}; use SUM and divide with the rounding that you want"
        )
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and dtype.is_floating_point:
        raise ValueError(f"{call}: ReduceOp.{op.name} is for integers and bool, and this is a tensor of {dtype}")
    return TYPES[dtype], 1, code


def is_plain(tensor):
    """Whether the elements are in memory in their order, without gaps or lazy conversions."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def check_dense(tensor, call):
    """Raises a ValueError unless the tensor is dense and on the host or a CUDA device."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{call}: the tensor is {tensor.layout}; the kolo backend takes dense tensors, and sparse COO ones for all_reduce")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(f"{call}: the kolo backend does not support tensors on {tensor.device}")
    if tensor.is_quantized:
        raise ValueError(f"{call}: the kolo backend does not support quantized tensors; dequantize them first")


def check_writable(tensor, call):
    """The same for a tensor that is written."""
    check_dense(tensor, call)
    if not tensor.is_contiguous() and any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride())):
        raise ValueError(f"{call}: elements of a tensor that is written share memory (as after expand); clone() it first")


def check_same_type(one, other, call):
    if one.dtype != other.dtype:
        raise ValueError(f"{call}: tensors of {one.dtype} and of {other.dtype} in one call; all must have the same type")
    if one.device != other.device:
        raise ValueError(f"{call}: tensors on {one.device} and on {other.device} in one call; all must be on the same device")


def overlap(one, other):
    """Whether two contiguous tensors share memory."""
    a, b = one.data_ptr(), other.data_ptr()
    return a < b + other.nbytes and b < a + one.nbytes
