"""Builds torch_kolo: the shared library of kolo, and the backend in Python on it, which fits every
PyTorch.

cargo builds the library from the repository around this folder, or from `kolo` inside it in a
source distribution. On a machine without Rust, set KOLO_LIBRARY=PREFIX/lib/libkolo.so to use an
installed library (scripts/install.sh).

KOLO_FEATURES lists the features of the build; the default is "cuda", and "" means none. Without
"cuda", tensors on GPUs are copied to the host. The backend asks the library at run time.

KOLO_TORCH_CPP=1 also builds the backend in C++, for the PyTorch of this environment. Its calls take
less time. It needs a C++20 compiler, and pip install --no-build-isolation.

KOLO_PLATFORM names the platform of the wheel, in place of this machine's.
"""

import functools
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str((HERE / "kolo" if (HERE / "kolo").is_dir() else HERE.parent) / "scripts"))
from python_package import REPOSITORY, SHARED, PlatformWheel, WithLibrary, WithSources, built_by_cargo, strip  # noqa: E402

WITH_CPP = os.environ.get("KOLO_TORCH_CPP", "") == "1"


@functools.cache
def libraries():
    """The folder with the shared library and the archive."""
    given = os.environ.get("KOLO_LIBRARY")
    if not given:
        return built_by_cargo("kolo-capi")
    path = Path(given).resolve()
    if not path.is_file():
        sys.exit(f"KOLO_LIBRARY is {given}, where there is no file")
    return path.parent


class BuildPython(build_py):
    """Adds the library to the package."""

    def run(self):
        super().run()
        package = HERE / "src" / "torch_kolo" if self.editable_mode else Path(self.build_lib) / "torch_kolo"
        package.mkdir(parents=True, exist_ok=True)
        shared = libraries() / SHARED
        if shared.is_file():
            shutil.copyfile(shared, package / SHARED)
            strip(package / SHARED)
        elif not WITH_CPP:
            sys.exit(f"there is no {shared}, which the backend in Python needs")


class Wheel(PlatformWheel):
    """The backend in C++ is for one Python."""

    def get_tag(self):
        return super(PlatformWheel, self).get_tag() if WITH_CPP else super().get_tag()


def with_cpp():
    """The arguments of `setup` for the backend in C++."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        sys.exit(
            "KOLO_TORCH_CPP=1 builds for the PyTorch of this environment, and there is none: pip install torch, then --no-build-isolation"
        )
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        sys.exit(f"the backend in C++ needs PyTorch 2.11 or newer, and this is {torch.__version__}; the one in Python does not")

    class Build(BuildExtension):
        """Builds with kolo's archive, and says in the package which PyTorch it is for."""

        def run(self):
            archive = libraries() / "libkolo.a"
            if not archive.is_file():
                sys.exit(f"there is no {archive}, which the backend in C++ needs")
            installed = archive.parent.parent / "include"
            include = installed if (installed / "kolo.h").is_file() else REPOSITORY / "include"
            (extension,) = self.extensions
            extension.include_dirs.append(str(include))
            extension.depends += [str(archive), str(include / "kolo.h")]
            # On Linux the symbols of the archive stay hidden, so another kolo in the process does
            # not clash.
            hidden = ["-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lm"]
            of_macos = ["-framework", "CoreFoundation", "-lobjc", "-liconv", "-lm"]
            extension.extra_link_args += [str(archive), *(of_macos if sys.platform == "darwin" else hidden)]
            package = HERE / "src" / "torch_kolo" if self.editable_mode else Path(self.build_lib) / "torch_kolo"
            package.mkdir(parents=True, exist_ok=True)
            (package / "_build.py").write_text(f'"""Written by setup.py."""\n\ntorch_version = "{torch.__version__}"\n')
            # What is in build/ may be for another PyTorch.
            self.force = True
            super().run()

    extension = CppExtension(
        name="torch_kolo._C",
        sources=[str(path.relative_to(HERE)) for path in sorted((HERE / "csrc").glob("*.cpp"))],
        depends=[os.path.relpath(path, HERE) for path in (HERE / "csrc").glob("*.hpp")],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
    )
    return {"ext_modules": [extension]}, {"build_ext": Build}


extensions, commands = with_cpp() if WITH_CPP else ({}, {})
setup(
    **extensions, distclass=WithLibrary, cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel, "sdist": WithSources, **commands}
)
