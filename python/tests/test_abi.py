"""The module says of kolo.h what the header says."""

import ctypes
import re

import pytest
from pykolo import _abi
from pykolo._library import PREFIX

HEADERS = [PREFIX / "include" / "kolo.h", *(parent / "include" / "kolo.h" for parent in PREFIX.parents)]
HEADER = next(path for path in HEADERS if path.is_file()).read_text()
CODE = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL))

NUMBERS = {"int32_t", "kolo_result_t", "kolo_dtype_t", "kolo_redop_t", "kolo_cause_t", "kolo_op_t"}
POINTERS = {"kolo_comm_t", "kolo_work_t", "kolo_reply_t", "kolo_stream_t"}
STRUCTURES = {
    "kolo_error_t": _abi.Error,
    "kolo_config_t": _abi.Config,
    "kolo_store_t": _abi.Store,
    "kolo_comm_stats_t": _abi.CommStats,
    "kolo_unique_id_t": _abi.UniqueId,
}


def type_of(text):
    """The type of ctypes for one of C."""
    text = re.sub(r"\b(const|struct)\b", "", text).strip()
    base, stars = text.replace("*", "").strip(), text.count("*")
    if base == "void" and stars == 1 or base in POINTERS and not stars:
        return ctypes.c_void_p
    if base == "char" and stars:
        return ctypes.POINTER(ctypes.c_char_p) if stars == 2 else ctypes.c_char_p
    functions = {"kolo_wait_check_t": _abi.WaitCheck, "kolo_done_function_t": _abi.DoneFunction}
    simple = {"size_t": ctypes.c_size_t, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double}
    pointers = dict.fromkeys(POINTERS | {"void"}, ctypes.c_void_p)
    found = {**simple, **functions, **STRUCTURES, **pointers, **dict.fromkeys(NUMBERS, ctypes.c_int32)}[base]
    return ctypes.POINTER(found) if stars == (2 if base == "void" else 1) else found


def declared():
    """The functions of the header: their result and arguments, by name."""
    found = {}
    for result, name, arguments in re.findall(r"^((?:const )?\w+ \*?)\s*kolo_(\w+)\(([^()]*)\);", CODE, flags=re.MULTILINE):
        listed = [] if arguments == "void" else [re.sub(r"\w+$", "", each.strip()) for each in arguments.split(",")]
        found[name] = [result, *listed]
    return found


DECLARED = declared()


@pytest.mark.parametrize("name", sorted(_abi.FUNCTIONS))
def test_a_function_has_the_types_of_the_header(name):
    assert [type_of(each) for each in DECLARED[name]] == list(_abi.FUNCTIONS[name])


@pytest.mark.parametrize("name", sorted(_abi.OPERATIONS))
def test_an_operation_has_the_types_of_the_header(name):
    blocking = [ctypes.c_int32, *_abi.OPERATIONS[name], ctypes.c_void_p, ctypes.c_void_p]
    assert [type_of(each) for each in DECLARED[name]] == blocking
    assert [type_of(each) for each in DECLARED["start_" + name]] == [*blocking, ctypes.POINTER(ctypes.c_void_p)]


def test_every_function_is_known():
    known = {*_abi.FUNCTIONS, *_abi.OPERATIONS, *("start_" + name for name in _abi.OPERATIONS)}
    unknown = {name for name in DECLARED if name not in known and not name.startswith("reducer_")}
    # Groups are for programs without send_recv, and the size of an element is Python's to know.
    assert unknown == {"dtype_size", "group_start", "group_end"}


def test_constants_are_those_of_the_header():
    for name, number in re.findall(r"^#define KOLO_(\w+) (-?\d+)$", HEADER, flags=re.MULTILINE):
        if name.startswith("CAUSE_"):
            cause = name.removeprefix("CAUSE_").lower()
            assert _abi.CAUSES[int(number)] == (None if cause == "none" else cause)
        elif name.startswith("OP_"):
            assert int(number) == -1 or _abi.OPS[int(number)] == name.removeprefix("OP_").lower()
        elif name.startswith("VERSION_"):
            assert _abi.VERSION[["MAJOR", "MINOR", "PATCH"].index(name.removeprefix("VERSION_"))] == int(number)
        elif not name.startswith(("REDUCER_", "UNUSED_", "UNEVEN_", "HOOK_", "SYNC_")):
            assert getattr(_abi, name) == int(number), name


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_structures_have_the_fields_of_the_header(name):
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", CODE, flags=re.DOTALL).group(1)
    fields = re.findall(r"(?:\(\*(\w+)\)\([^)]*\)|(\w+)(?:\[\d+\])?);", body)
    assert [a or b for a, b in fields] == [field for field, *_ in STRUCTURES[name]._fields_]
    for line in body.split(";"):
        match = re.fullmatch(r"\s*(\w[\w ]*[ *]+)(\w+)\s*", line)
        if match:
            assert dict(STRUCTURES[name]._fields_)[match.group(2)] is type_of(match.group(1)), match.group(2)
