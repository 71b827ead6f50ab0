"""Buffers: where the memory of an object is, how many elements of which type it has, and new ones.

An object has memory of its own if it is a numpy array, or has the buffer protocol,
``__cuda_array_interface__``, ``__array_interface__`` or ``__dlpack__``.
"""

from __future__ import annotations

import array
import ctypes
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from . import _abi
from ._errors import ArgumentError

try:
    from ._fast import know
except ImportError:

    def know(array_type: type) -> None:
        """The long way knows it."""


# A view of writable memory, which ctypes passes as its address. It takes a third of the time of all
# other ways.
_writable_view: Any = (ctypes.c_char * 0).from_buffer

# The types of elements that kolo has, by kind and bytes as in numpy.
_CODES = {
    ("b", 1): _abi.BOOL,
    ("i", 1): _abi.INT8,
    ("i", 2): _abi.INT16,
    ("i", 4): _abi.INT32,
    ("i", 8): _abi.INT64,
    ("u", 1): _abi.UINT8,
    ("u", 2): _abi.UINT16,
    ("u", 4): _abi.UINT32,
    ("u", 8): _abi.UINT64,
    ("f", 2): _abi.FLOAT16,
    ("f", 4): _abi.FLOAT32,
    ("f", 8): _abi.FLOAT64,
}
# Those of ml_dtypes, which numpy and DLPack do not know as kinds.
_NAMED = {"bfloat16": _abi.BFLOAT16, "float8_e4m3fn": _abi.FLOAT8_E4M3, "float8_e5m2": _abi.FLOAT8_E5M2}
_NAMES = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
# The kinds of the formats of memoryview.
_FORMATS = {"?": "b", **dict.fromkeys("bhilqn", "i"), **dict.fromkeys("BHILQNc", "u"), **dict.fromkeys("efd", "f")}
_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_DLPACK_HANDLE = 3
_DLPACK_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_DLPACK_NAMED = {4: "bfloat16", **{code: "float8_" + name for code, name in enumerate(_DLPACK_FLOAT8, 7)}}
_ON_HOST, _ON_CUDA = (1, 3, 11), (2, 13)


class Element:
    """A type of elements: a type of kolo, of which each has ``parts``."""

    __slots__ = ("code", "is_complex", "is_raw", "name", "parts", "size")

    def __init__(self, kind: str, size: int, name: str = "") -> None:
        """``kind`` is as in numpy."""
        self.size = size
        self.name = name or (_NAMES[kind] + str(8 * size) if kind in _NAMES and kind != "b" else "bool" if kind == "b" else f"{kind}{size}")
        code = _NAMED.get(self.name, _CODES.get((kind, size)))
        self.is_complex = code is None and kind == "c" and size in (8, 16)
        # kolo moves elements of any type, as bytes, and reduces those that it knows.
        self.is_raw = code is None and not self.is_complex
        if self.is_complex:
            code, self.parts = _CODES["f", size // 2], 2
        else:
            self.parts = size if self.is_raw else 1
        self.code: int = _abi.UINT8 if code is None else code


# The types of arrays, and of their elements, for which `memory_of` need not look further. They are
# entered when they are first seen, because pykolo does not import numpy.
_fast_arrays: set[type] = set()
_fast_elements: dict[Any, Element] = {}


class Memory:
    """The memory of an object. It stays where it is as long as this lives."""

    __slots__ = ("count", "element", "is_readonly", "keep", "on_device", "pointer", "shape", "stream")

    def __init__(
        self,
        keep: Any,
        pointer: Any,
        shape: tuple[int, ...],
        element: Element,
        is_readonly: bool = False,
        on_device: bool = False,
        stream: int = 0,
    ) -> None:
        """``pointer``: what ctypes passes as the address."""
        self.keep = keep
        self.pointer = pointer
        self.shape = shape
        self.count = math.prod(shape)
        self.element = element
        self.is_readonly = is_readonly
        self.on_device = on_device
        self.stream = stream

    @property
    def parts(self) -> int:
        """How many of kolo's elements it has."""
        return self.count * self.element.parts


def memory_of(x: Any, op: str, name: str, writes: bool = False, stream: int = 0) -> Memory:
    """The memory of an argument of an operation, which the operation ``writes``."""
    if type(x) in _fast_arrays and (element := _fast_elements.get(x.dtype)) is not None:
        try:
            view = _writable_view(x)
        except (TypeError, ValueError, BufferError):
            pass
        else:
            return Memory(view, view, x.shape, element)
    numpy = sys.modules.get("numpy")
    found: Memory | None
    if numpy is not None and isinstance(x, numpy.ma.MaskedArray):
        raise ArgumentError(f"{op}: {name} has a mask, which no operation looks at: pass {name}.filled(...)", op=op)
    if numpy is not None and isinstance(x, numpy.generic):
        # The buffers of scalars have other elements than their arrays: those of dates are bytes.
        array_of = numpy.asarray(x)
        array_of.flags.writeable = False
        found = _of_numpy(array_of, numpy, op, name)
    elif numpy is not None and isinstance(x, numpy.ndarray):
        found = _of_numpy(x, numpy, op, name)
    else:
        found = _of_buffer(x, op, name) or _of_interface(x, op, name) or _of_dlpack(x, op, name, stream)
    if found is None:
        raise ArgumentError(
            f"{op}: {name} is a {type(x).__name__}, which has no memory that kolo can use: pass a numpy array, an array.array, or "
            "another object with the buffer protocol, __array_interface__ or __dlpack__",
            op=op,
        )
    if writes and found.is_readonly:
        raise ArgumentError(f"{op}: {name} is read-only, and {op} writes it: pass a writable copy, such as numpy.array({name})", op=op)
    return found


def _addresses(op: str, name: str) -> ArgumentError:
    return ArgumentError(f"{op}: {name} has elements of the type object, which are addresses: use {op}_object, or another type", op=op)


def _strided(op: str, name: str) -> ArgumentError:
    return ArgumentError(f"{op}: {name} is not contiguous in memory: pass numpy.ascontiguousarray({name}), or another copy in C order, and use that", op=op)


def _of_numpy(x: Any, numpy: Any, op: str, name: str) -> Memory:
    dtype = x.dtype
    if not x.flags.c_contiguous:
        raise _strided(op, name)
    if dtype.hasobject:
        raise _addresses(op, name)
    # An element whose bytes are swapped can be moved, but not reduced.
    kind = dtype.kind if dtype.isnative else "V"
    element = Element(kind, dtype.itemsize, str(dtype))
    if type(x) is numpy.ndarray and not element.is_raw and not element.is_complex and kind in "biuf" and element.name not in _NAMED:
        if numpy.ndarray not in _fast_arrays:
            _fast_arrays.add(numpy.ndarray)
            know(numpy.ndarray)
        _fast_elements[dtype] = element
    address, is_readonly = x.__array_interface__["data"]
    return Memory(x, ctypes.c_void_p(address), x.shape, element, is_readonly)


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    if view.nbytes == 0:
        return 0
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def _of_buffer(x: Any, op: str, name: str) -> Memory | None:
    try:
        view = memoryview(x)
    except (TypeError, BufferError, ValueError):
        return None
    if not view.c_contiguous:
        raise _strided(op, name)
    letter = view.format.lstrip("@=" + ("<" if sys.byteorder == "little" else ">"))
    kind = "c" if letter in ("Zf", "Zd") else _FORMATS.get(letter, "V")
    # Of objects, pointers and functions, also in structs, but not of complex numbers, nor in names.
    if any(code in re.sub("Z[fdg]|:[^:]*:", "", view.format) for code in "OPzZ&X"):
        raise _addresses(op, name)
    element = Element(kind, view.itemsize, "" if kind != "V" else view.format)
    # The view keeps an object from changing its size.
    return Memory(view, ctypes.c_void_p(_address(view)), view.shape or (), element, view.readonly)


def _of_interface(x: Any, op: str, name: str) -> Memory | None:
    for attribute in ("__cuda_array_interface__", "__array_interface__"):
        try:
            given = getattr(x, attribute)
        except Exception:
            continue
        break
    else:
        return None
    # That of a type is no dict, but what its objects have.
    if not isinstance(given, dict) or not isinstance(given.get("data"), tuple):
        return None
    address, is_readonly = given["data"]
    typestr, shape = given["typestr"], tuple(given["shape"])
    # Such as <f4, >i8, <M8[ns], and <U5, which has 5 elements of 4 bytes.
    parts = re.fullmatch(r"([<>|=])([a-zA-Z])([1-9]\d*)(\[.*\])?", typestr)
    if parts is None or parts[2] not in "biufcmMSUVO":
        raise ArgumentError(f"{op}: {name} has elements of {typestr!r}, which kolo does not know: pass another type", op=op)
    order, kind, size = parts[1], parts[2], int(parts[3]) * (4 if parts[2] == "U" else 1)
    if kind == "O" or _has_objects(given.get("descr")):
        raise _addresses(op, name)
    if given.get("mask") is not None:
        raise ArgumentError(f"{op}: {name} has a mask, which no operation looks at: pass a copy without", op=op)
    strides = given.get("strides")
    if strides is not None and not _is_contiguous(shape, strides, size):
        raise _strided(op, name)
    is_native = order in ("|", "=", "<" if sys.byteorder == "little" else ">")
    known = str(getattr(getattr(x, "dtype", None), "name", ""))
    if kind == "V":
        descr = given.get("descr")
        typestr = known or typestr if descr in (None, [("", typestr)]) else str(descr)
    element = Element(kind if is_native else "V", size, known if known in _NAMED else "" if is_native and kind in _NAMES else typestr)
    on_device = attribute == "__cuda_array_interface__"
    # 1 is the default stream, which is NULL in C.
    stream = (given.get("stream") or 0) if on_device else 0
    return Memory(x, ctypes.c_void_p(address or 0), shape, element, is_readonly, on_device, 0 if stream == 1 else stream)


def _has_objects(descr: Any) -> bool:
    """Whether fields of elements are objects: each has a name and a type, or fields of its own."""
    types = [field[1] for field in descr or ()]
    return any("O" in each[1:2] if isinstance(each, str) else _has_objects(each) for each in types)


def _is_contiguous(shape: tuple[int, ...], strides: Sequence[int], size: int) -> bool:
    """Whether elements are in C order without gaps. The stride of an axis of length 1 says nothing."""
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != size and 0 not in shape:
            return False
        size *= length
    return True


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _of_dlpack(x: Any, op: str, name: str, stream: int) -> Memory | None:
    if not hasattr(x, "__dlpack__"):
        return None
    try:
        on_device = x.__dlpack_device__()[0] in _ON_CUDA
        # 1 is CUDA's default stream.
        ordered = {"stream": stream or 1} if on_device else {}
        try:
            capsule = x.__dlpack__(max_version=(1, 0), **ordered)
        except TypeError:
            capsule = x.__dlpack__(**ordered)
    except Exception as error:
        raise ArgumentError(f"{op}: {name} is a {type(x).__name__} that gives no access to its memory: {error}", op=op) from error
    api = ctypes.pythonapi
    is_valid, pointer = api.PyCapsule_IsValid, api.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    held = ctypes.py_object(capsule)
    is_readonly = _is_immutable(x)
    if is_valid(held, b"dltensor_versioned"):
        versioned = _Versioned.from_address(pointer(held, b"dltensor_versioned"))
        is_readonly = is_readonly or bool(versioned.flags & 1)
        tensor = versioned.tensor
    elif is_valid(held, b"dltensor"):
        tensor = _Tensor.from_address(pointer(held, b"dltensor"))
    else:
        return None
    if tensor.device not in _ON_HOST + _ON_CUDA:
        raise ArgumentError(f"{op}: {name} is on a device of DLPack's type {tensor.device}: copy it to the host or to CUDA", op=op)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_contiguous(shape, tensor.strides[: tensor.ndim], 1):
        raise _strided(op, name)
    if tensor.code == _DLPACK_HANDLE:
        raise _addresses(op, name)
    if tensor.bits % 8:
        raise ArgumentError(f"{op}: {name} has elements of {tensor.bits} bits: pass a type of whole bytes", op=op)
    size = tensor.bits * tensor.lanes // 8
    kind = _DLPACK_KINDS.get(tensor.code, "V") if tensor.lanes == 1 else "V"
    known = _DLPACK_NAMED.get(tensor.code, "") if tensor.lanes == 1 else ""
    if kind == "V" and not known:
        known = f"{tensor.lanes} lanes of {tensor.bits} bits of DLPack's type {tensor.code}"
    element = Element(kind, size, known)
    # The capsule is not consumed: it frees the tensor when it is dropped.
    on_device = tensor.device in _ON_CUDA
    return Memory((x, capsule), ctypes.c_void_p((tensor.data or 0) + tensor.byte_offset), shape, element, is_readonly, on_device, stream)


def is_same_type(x: Memory, out: Memory) -> bool:
    """Whether the elements of both have the same type."""
    given, other = x.element, out.element
    if (given.code, given.parts, given.is_raw) != (other.code, other.parts, other.is_raw):
        return False
    if not given.is_raw or given.name == other.name:
        return True
    # A type has another name as another kind of memory, such as a view of an array.
    try:
        numpy = sys.modules["numpy"]
        return bool(numpy.asarray(x.keep).dtype == numpy.asarray(out.keep).dtype != numpy.dtype(object))
    except Exception:
        # numpy does not know them, or is not loaded.
        return False


def new_like(x: Any, shape: tuple[int, ...], element: Element) -> Any:
    """A new array of the kind of an argument, or of a kind that can be written."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray | numpy.generic):
        return numpy.empty(shape, x.dtype)
    if isinstance(x, array.array):
        return array.array(x.typecode, bytes(math.prod(shape) * x.itemsize))
    if isinstance(x, bytes | bytearray):
        return bytearray(math.prod(shape))
    if hasattr(x, "new_empty"):
        return x.new_empty(shape)
    if hasattr(x, "__array_namespace__") and not _is_immutable(x):
        return x.__array_namespace__().empty(shape, dtype=x.dtype, device=x.device)
    if hasattr(x, "__array__"):
        import numpy as imported

        # Arrow's arrays have no dtype of numpy.
        return imported.empty(shape, x.dtype if hasattr(x, "dtype") else imported.asarray(x).dtype)
    made = bytearray(math.prod(shape) * element.size)
    try:
        own = memoryview(x).format.lstrip("@<=")
    except (TypeError, ValueError, BufferError):
        own = ""
    named = {name: letter for letter, name in _letters().items()}.get(element.name, "")
    for letter in (own, named):
        try:
            view = memoryview(made).cast(letter)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            continue
        if view.itemsize == element.size:
            return view.cast("B").cast(letter, shape) if made else view
    # No memoryview has such elements.
    return made


def _is_immutable(x: Any) -> bool:
    """JAX's arrays are, which only DLPack's new form can say."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


def as_array(memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array in the memory of an object of ctypes: of numpy, if that is installed, otherwise a
    memoryview.
    """
    try:
        import numpy
    except ImportError:
        letter = {name: letter for letter, name in _letters().items()}.get(str(dtype))
        view = memoryview(memory).cast("B")
        if letter is None:
            raise ArgumentError(f"alloc: {dtype} is not a type of memoryview, one of {', '.join(_letters().values())}: install numpy") from None
        return view.cast(letter, shape) if math.prod(shape) else view.cast(letter)  # type: ignore[call-overload]
    return numpy.ndarray(shape, dtype, memory)


def size_of(dtype: Any) -> int:
    """The bytes of an element."""
    try:
        import numpy
    except ImportError:
        for letter, name in _letters().items():
            if name == str(dtype):
                return array.array(letter).itemsize if letter != "?" else 1
        raise ArgumentError(f"alloc: {dtype} is not one of {', '.join(_letters().values())}: install numpy") from None
    try:
        known = numpy.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"alloc: dtype is {dtype!r}: {error}; give one of numpy's, such as 'float32'") from None
    if known.hasobject:
        raise ArgumentError(f"alloc: elements of {known} are addresses, which other ranks cannot use: give another type")
    return int(known.itemsize)


def _letters() -> dict[str, str]:
    """The formats of memoryview by the names of their types."""
    made = {letter: Element(_FORMATS[letter], array.array(letter).itemsize).name for letter in "bhiqBHIQfd"}
    return {**made, "?": "bool"}
