"""Builds torch_kolo: the backend in Python, which fits every PyTorch. kolo's library is that of pykolo.

KOLO_TORCH_CPP=1 also builds the backend in C++, for the PyTorch and the pykolo of this environment.
Its calls take less time. It needs a C++20 compiler, and pip install --no-build-isolation.
"""

import os
import sys
from pathlib import Path

import setuptools

HERE = Path(__file__).resolve().parent


def with_cpp():
    """The arguments of setuptools.setup for the backend in C++."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        sys.exit(f"KOLO_TORCH_CPP=1 needs setuptools 77 or newer, and this is {setuptools.__version__}: pip install 'setuptools>=77'")
    try:
        import torch
        from pykolo import _library
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        sys.exit(
            f"KOLO_TORCH_CPP=1 builds for the PyTorch and the pykolo of this environment: {error}; pip install torch ./python, then "
            "--no-build-isolation"
        )
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        sys.exit(f"the backend in C++ needs PyTorch 2.11 or newer, and this is {torch.__version__}; the one in Python does not")
    include = _library.PREFIX / "include"
    csrc = HERE / "csrc"

    def parts():
        """Two files that include all sources. Most of the time goes into PyTorch's headers, which each file reads again."""
        folder = HERE / "build"
        folder.mkdir(exist_ok=True)
        halves = ([], [])
        for source in sorted(csrc.glob("*.cpp"), key=lambda path: -path.stat().st_size):
            min(halves, key=lambda half: sum(path.stat().st_size for path in half)).append(source)
        for number, half in enumerate(halves):
            part = folder / f"part_{number}.cpp"
            part.write_text("".join(f'#include "../csrc/{source.name}"\n' for source in sorted(half)))
            yield str(part.relative_to(HERE))

    class Build(BuildExtension):
        """Says in the package which PyTorch the backend is for."""

        def run(self):
            package = HERE / "src" / "torch_kolo" if self.editable_mode or self.inplace else Path(self.build_lib) / "torch_kolo"
            package.mkdir(parents=True, exist_ok=True)
            (package / "_build.py").write_text(f'"""Written by setup.py."""\n\ntorch_version = "{torch.__version__}"\n')
            # What is in build/ may be for another PyTorch.
            self.force = True
            super().run()

    extension = CppExtension(
        name="torch_kolo._C",
        sources=list(parts()),
        depends=[str(include / "kolo.h"), *(str(path.relative_to(HERE)) for path in csrc.iterdir())],
        include_dirs=[str(include)],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        # pykolo loads the library before.
        extra_link_args=[_library._loaded._name],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setuptools.setup(**(with_cpp() if os.environ.get("KOLO_TORCH_CPP", "") == "1" else {}))
