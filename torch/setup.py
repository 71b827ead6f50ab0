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
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE / "kolo" if (HERE / "kolo" / "Cargo.toml").is_file() else HERE.parent
# What the wheel is for, such as win_amd64.
PLATFORM = os.environ.get("KOLO_PLATFORM") or sysconfig.get_platform()
SHARED = {"mac": "libkolo.dylib", "win": "kolo.dll"}.get(PLATFORM[:3], "libkolo.so")
WITH_CPP = os.environ.get("KOLO_TORCH_CPP", "") == "1"


@functools.cache
def libraries():
    """The folder with the shared library and the archive."""
    given = os.environ.get("KOLO_LIBRARY")
    if given:
        path = Path(given).resolve()
        if not path.is_file():
            sys.exit(f"KOLO_LIBRARY is {given}, where there is no file")
        return path.parent
    if not (REPOSITORY / "Cargo.toml").is_file():
        sys.exit(f"torch_kolo is built inside kolo's repository; elsewhere, set KOLO_LIBRARY to a {SHARED}")
    try:
        features = os.environ.get("KOLO_FEATURES", "cuda")
        subprocess.run(["cargo", "build", "--profile", "dist", "--package", "kolo-capi", "--features", features], cwd=REPOSITORY, check=True)
    except FileNotFoundError:
        sys.exit(f"there is no cargo: install Rust, or set KOLO_LIBRARY to a {SHARED} that was built elsewhere")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"cargo could not build kolo (it ended with {failed.returncode})")
    return REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "dist"


class BuildPython(build_py):
    """Adds the library to the package."""

    def run(self):
        super().run()
        package = HERE / "src" / "torch_kolo" if self.editable_mode else Path(self.build_lib) / "torch_kolo"
        package.mkdir(parents=True, exist_ok=True)
        shared = libraries() / SHARED
        if shared.is_file():
            shutil.copyfile(shared, package / SHARED)
            # Four fifths of the library are for debuggers. Without `strip` the package is larger.
            if sys.platform != "win32" and not os.environ.get("KOLO_PLATFORM") and shutil.which("strip"):
                subprocess.run(["strip", "-x" if sys.platform == "darwin" else "--strip-debug", package / SHARED], check=True)
        elif not WITH_CPP:
            sys.exit(f"there is no {shared}, which the backend in Python needs")
        if self.editable_mode or not WITH_CPP:
            return


class WithLibrary(Distribution):
    """Belongs where packages of one platform are, although no module is compiled."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """The backend in Python fits every Python and PyTorch, and the library one platform."""

    def finalize_options(self):
        if os.environ.get("KOLO_PLATFORM"):
            self.plat_name = os.environ["KOLO_PLATFORM"]
            self.plat_name_supplied = True
        super().finalize_options()

    def get_tag(self):
        tag = super().get_tag()
        return tag if WITH_CPP else ("py3", "none", tag[2])


class WithSources(sdist):
    """Adds the Rust sources to a source distribution, as the folder `kolo`."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in sources():
            into = Path(base_dir, "kolo", name)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, into)


def sources():
    """What cargo needs of the repository to build the library."""
    if REPOSITORY.parent == HERE:
        return [
            path.relative_to(REPOSITORY)
            for path in REPOSITORY.rglob("*")
            if path.is_file() and "target" not in path.relative_to(REPOSITORY).parts
        ]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and not name.startswith(("torch/", ".")) and (REPOSITORY / name).is_file()]


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
    **extensions, distclass=WithLibrary, cmdclass={"build_py": BuildPython, "bdist_wheel": PlatformWheel, "sdist": WithSources, **commands}
)
