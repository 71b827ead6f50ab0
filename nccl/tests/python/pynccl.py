"""Ranks as processes, by the functions and ctypes signatures that vLLM's pynccl_wrapper.py declares.

pynccl.py LIBRARY RANKS
"""

import ctypes
import multiprocessing
import sys

result, dtype, redop = ctypes.c_int, ctypes.c_int, ctypes.c_int
comm, stream, buffer, window = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.POINTER
FUNCTIONS = {
    "ncclGetErrorString": (ctypes.c_char_p, [result]),
    "ncclGetVersion": (result, [pointer(number)]),
    "ncclGetUniqueId": (result, [pointer(UniqueId)]),
    "ncclCommInitRank": (result, [pointer(comm), number, UniqueId, number]),
    "ncclAllReduce": (result, [buffer, buffer, size, dtype, redop, comm, stream]),
    "ncclReduce": (result, [buffer, buffer, size, dtype, redop, number, comm, stream]),
    "ncclAllGather": (result, [buffer, buffer, size, dtype, comm, stream]),
    "ncclReduceScatter": (result, [buffer, buffer, size, dtype, redop, comm, stream]),
    "ncclSend": (result, [buffer, size, dtype, number, comm, stream]),
    "ncclRecv": (result, [buffer, size, dtype, number, comm, stream]),
    "ncclBroadcast": (result, [buffer, buffer, size, dtype, number, comm, stream]),
    "ncclCommDestroy": (result, [comm]),
    "ncclGroupStart": (result, []),
    "ncclGroupEnd": (result, []),
    "ncclCommWindowRegister": (result, [comm, buffer, size, pointer(window), number]),
    "ncclCommWindowDeregister": (result, [comm, window]),
}


def load(path):
    library = ctypes.CDLL(path)
    for name, (returns, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = returns, arguments
    return library


def rank(path, ranks, own, id_bytes):
    nccl = load(path)

    def call(name, *arguments):
        code = getattr(nccl, name)(*arguments)
        assert code == 0, f"{name}: {nccl.ncclGetErrorString(code)}"

    unique, this = UniqueId.from_buffer_copy(id_bytes), comm()
    call("ncclCommInitRank", ctypes.byref(this), ranks, unique, own)
    floats = lambda *values: (ctypes.c_float * len(values))(*values)
    mine, out, all_of = floats(own + 1), floats(0), floats(*[0] * ranks)
    call("ncclAllReduce", mine, out, 1, 7, 0, this, None)
    assert out[0] == ranks * (ranks + 1) / 2
    call("ncclAllGather", mine, all_of, 1, 7, this, None)
    assert list(all_of) == [float(one + 1) for one in range(ranks)]
    call("ncclReduceScatter", all_of, out, 1, 7, 0, this, None)
    assert out[0] == ranks * (own + 1)
    call("ncclReduce", mine, out, 1, 7, 2, 0, this, None)
    assert own != 0 or out[0] == ranks
    call("ncclBroadcast", mine, out, 1, 7, ranks - 1, this, None)
    assert out[0] == ranks
    call("ncclGroupStart")
    call("ncclSend", mine, 1, 7, (own + 1) % ranks, this, None)
    call("ncclRecv", out, 1, 7, (own - 1) % ranks, this, None)
    call("ncclGroupEnd")
    assert out[0] == (own - 1) % ranks + 1
    registered = window()
    call("ncclCommWindowRegister", this, mine, 4, ctypes.byref(registered), 1)
    call("ncclCommWindowDeregister", this, registered)
    call("ncclCommDestroy", this)


def main():
    path, ranks = sys.argv[1], int(sys.argv[2])
    nccl, unique, version = load(path), UniqueId(), number()
    assert nccl.ncclGetVersion(ctypes.byref(version)) == 0 and version.value >= 22700
    assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank, args=(path, ranks, own, bytes(unique))) for own in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * ranks
    print(f"pynccl.py: {ranks} ranks are right")


if __name__ == "__main__":
    main()
