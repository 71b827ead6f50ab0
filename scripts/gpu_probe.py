"""Asks the GPU for gpu_check.py, in a process of its own, because a driver may hang. Prints a line of JSON.

    python3 gpu_probe.py device    its name, or `missing`, why there is none
    python3 gpu_probe.py torch     the version of PyTorch and the folders where it has CUDA's libraries
    python3 gpu_probe.py copies    how fast copies are, in PyTorch
"""

import ctypes
import glob
import importlib.util
import json
import sys
from pathlib import Path

LARGE = 256 << 20


def device():
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"missing": "there is no CUDA driver here (libcuda.so.1)"}
    if result := cuda.cuInit(0):
        return {"missing": f"the CUDA driver does not start (error {result})"}
    count, version = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if count.value == 0:
        return {"missing": "there is no GPU here"}
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, 256, 0)
    return {
        "device": name.value.decode(errors="replace"),
        "gpus": count.value,
        "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
    }


def pytorch():
    spec = importlib.util.find_spec("torch")
    # Without a file it is only a folder of this name.
    if not spec or not spec.origin:
        return {"missing": "there is no PyTorch here"}
    try:
        import torch
    except (ImportError, OSError) as problem:
        return {"missing": f"PyTorch cannot be imported: {problem}"}
    packages = Path(torch.__file__).parent.parent / "nvidia"
    libraries = [found for name in ("cuda_nvrtc/lib", "cuda_runtime/lib", "cu*/lib") for found in glob.glob(str(packages / name))]
    return {"torch": torch.__version__, "libraries": libraries}


def copies():
    """Measures the bounds of the goals: copies on the device, and both ways through pinned memory."""
    import torch

    def median(copy, count=10):
        took = []
        for _ in range(count):
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            copy()
            ended.record()
            torch.cuda.synchronize()
            took.append(began.elapsed_time(ended) * 1e-3)
        return sorted(took)[count // 2]

    one, other = (torch.zeros(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2))
    # Bytes that are read, and bytes that are written.
    rate = 2 * LARGE / median(lambda: one.copy_(other)) * 1e-9
    # For two ranks that share the GPU's copy engines.
    size = 2 * (64 << 20)
    hosts = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both_ways():
        now = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(now)
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(one[:size], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other[:size].copy_(hosts[1], non_blocking=True)
        for stream in streams:
            now.wait_stream(stream)

    return {"device_copy_gbs": round(rate, 1), "pinned_both_ways_us": round(median(both_ways) * 1e6, 1)}


if __name__ == "__main__":
    print(json.dumps({"device": device, "torch": pytorch, "copies": copies}[sys.argv[1]]()))
