"""Loads NCCL by its name, and says which file that is."""

import ctypes
import re

nccl = ctypes.CDLL("libnccl.so.2")
version = ctypes.c_int()
assert nccl.ncclGetVersion(ctypes.byref(version)) == 0
with open("/proc/self/maps") as maps:
    found = {name for line in maps for name in re.findall(r"[^/\n]*nccl[^/\n]*$", line)}
print(", ".join(sorted(found)), "is loaded")
