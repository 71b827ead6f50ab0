"""Builds pykolo: the module, with the program kolo, the shared library and its header.

For Linux it also has what `kolo run --nccl` loads: the functions of NCCL, in lib/kolo/libnccl.so.2 of the
environment. The wheel also has the program's man pages, and its completions for bash, zsh and fish.

cargo builds them from the repository around this folder, or from `kolo` inside it in a source
distribution. KOLO_BUILT=/FOLDER uses a folder with the program and the library in place of cargo.

A compiler of C makes the short way of small operations, `_fast`. Without one, or without Python's
headers, the package has the long way alone. CC and LDSHARED name a compiler and linker for another
machine, as scripts/wheels.sh does.

KOLO_FEATURES lists the features of the build; the default is "cuda", which needs nothing of CUDA to
build or to start. KOLO_PLATFORM names the platform of the wheel, in place of this machine's. KOLO_MAN
is a folder with the man pages, for a program that does not run on this machine.
"""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from distutils.command.build_scripts import build_scripts
from distutils.command.install_data import install_data

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE / "kolo" if (HERE / "kolo").is_dir() else HERE.parent
# What the wheel is for, such as win_amd64.
PLATFORM = os.environ.get("KOLO_PLATFORM") or sysconfig.get_platform()
SHARED = {"mac": "libkolo.dylib", "win": "kolo.dll"}.get(PLATFORM[:3], "libkolo.so")

VERSION = "0.1.0"
ABI = "0.1"
IS_WINDOWS = PLATFORM.startswith("win")
PROGRAM = "kolo.exe" if IS_WINDOWS else "kolo"

# A wheel has no links, so the library has the name that programs load.
NAME = {"libkolo.so": f"libkolo.so.{ABI}", "libkolo.dylib": f"libkolo.{ABI}.dylib"}.get(SHARED, SHARED)
FEATURES = [name for name in os.environ.get("KOLO_FEATURES", "cuda").split(",") if name]
# The functions of NCCL, which has no programs for other systems. They need kolo's feature cuda, and cargo
# would build the rest with it.
NCCL = "libkolo_nccl.so" if SHARED == "libkolo.so" and "cuda" in FEATURES else None
LINKED = "${prefix}/lib/" + ("libkolo.dll.a" if IS_WINDOWS else NAME)
PKG_CONFIG = f"""prefix=${{pcfiledir}}/../..
includedir=${{prefix}}/include

Name: kolo
Description: Collective communication for processes
URL: https://docs.rs/kolo
Version: {VERSION}
Libs: {LINKED}
Cflags: -I${{includedir}}
"""


def built_by_cargo():
    """Builds with the features of KOLO_FEATURES. Returns the folder."""
    packages = ["kolo-capi", "kolo-cli"]
    given = [f"{package}/{name}" for package in packages for name in FEATURES]
    if NCCL:
        packages.append("kolo-nccl")
    command = ["cargo", "build", "--profile", "dist", *(f"--package={package}" for package in packages), "--features", ",".join(given)]
    try:
        subprocess.run(command, cwd=REPOSITORY, check=True)
    except FileNotFoundError:
        sys.exit("there is no cargo: install Rust, or use what was built elsewhere, as the head of this file says")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"cargo could not build kolo (it ended with {failed.returncode})")
    return REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "dist"


@functools.cache
def built():
    """The folder with the program and the library."""
    given = os.environ.get("KOLO_BUILT")
    folder = Path(given).resolve() if given else built_by_cargo()
    for name in (SHARED, PROGRAM):
        if not (folder / name).is_file():
            sys.exit(f"there is no {folder / name}: build kolo-capi and kolo-cli, and set KOLO_BUILT to their folder, or do not set it")
    return folder


def strip(path):
    """Removes what is for debuggers: four fifths of a library. Without `strip` the package is larger."""
    if sys.platform != "win32" and not os.environ.get("KOLO_PLATFORM") and shutil.which("strip"):
        subprocess.run(["strip", "-x" if sys.platform == "darwin" else "--strip-debug", path], check=True)


# Nothing here compiles C for Windows on another system.
FAST = Extension(
    "pykolo._fast",
    ["src/pykolo/_fast.c"],
    include_dirs=[str(REPOSITORY / "include")],
    extra_compile_args=[] if IS_WINDOWS else ["-g0"],
    py_limited_api=True,
    optional=True,
)


class BuildPython(build_py):
    """Adds the library and its header to the package."""

    def run(self):
        # It keeps modules that are gone.
        shutil.rmtree(Path(self.build_lib) / "pykolo", ignore_errors=True)
        super().run()
        package = HERE / "src" / "pykolo" if self.editable_mode else Path(self.build_lib) / "pykolo"
        for name in ("lib/pkgconfig", "include", *(["bin"] if IS_WINDOWS else [])):
            (package / name).mkdir(parents=True, exist_ok=True)
        shared = package / ("bin" if IS_WINDOWS else "lib") / NAME
        shutil.copyfile(built() / SHARED, shared)
        strip(shared)
        if IS_WINDOWS:
            shutil.copyfile(built() / "libkolo.dll.a", package / "lib" / "libkolo.dll.a")
        elif SHARED == "libkolo.so":
            # For -lkolo: linkers read this in place of a link.
            (package / "lib" / SHARED).write_text(f"INPUT({NAME})\n")
        shutil.copyfile(REPOSITORY / "include" / "kolo.h", package / "include" / "kolo.h")
        (package / "lib" / "pkgconfig" / "kolo.pc").write_text(PKG_CONFIG)


class BuildProgram(build_scripts):
    """Adds the program where Python's programs are."""

    def get_source_files(self):
        return []

    def run(self):
        into = Path(self.build_dir)
        into.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built() / PROGRAM, into / PROGRAM)
        strip(into / PROGRAM)
        (into / PROGRAM).chmod(0o755)


class Package(Distribution):
    """Belongs where packages of one platform are, and has files for shells and for `man`, which
    InstallData finds.
    """

    data_files = []

    def has_ext_modules(self):
        return True

    def has_data_files(self):
        return not IS_WINDOWS


class InstallData(install_data):
    """Adds man pages and completions where shells and `man` look for them, and NCCL's functions where the
    program does.
    """

    def run(self):
        pages = os.environ.get("KOLO_MAN") or str(HERE / "build" / "man")
        if pages != os.environ.get("KOLO_MAN"):
            subprocess.run([built() / PROGRAM, "man", pages], check=True)
        completions = REPOSITORY / "cli" / "completions"
        self.data_files = [
            ("share/man/man1", sorted(map(str, Path(pages).iterdir()))),
            ("share/bash-completion/completions", [str(completions / "kolo")]),
            ("share/zsh/site-functions", [str(completions / "_kolo")]),
            ("share/fish/vendor_completions.d", [str(completions / "kolo.fish")]),
        ]
        # A folder of KOLO_BUILT may lack it.
        if NCCL and (built() / NCCL).is_file():
            library = HERE / "build" / "nccl" / "libnccl.so.2"
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built() / NCCL, library)
            strip(library)
            self.data_files.append(("lib/kolo", [str(library)]))
        super().run()


class PlatformWheel(bdist_wheel):
    """Fits every Python, and one platform."""

    def finalize_options(self):
        if os.environ.get("KOLO_PLATFORM"):
            self.plat_name = os.environ["KOLO_PLATFORM"]
            self.plat_name_supplied = True
        super().finalize_options()

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class WithSources(sdist):
    """Adds the Rust sources to a source distribution, as the folder `kolo`."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in _sources():
            into = Path(base_dir, "kolo", name)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, into)
            shutil.copymode(REPOSITORY / name, into)


def _sources():
    """What cargo needs of the repository."""
    if not (REPOSITORY / ".git").exists():
        # In a source distribution.
        files = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*") if path.is_file())
        return [path for path in files if "target" not in path.parts and "__pycache__" not in path.parts]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    left_out = ("torch/", "python/", ".")
    return [name for name in listed.split("\0") if name and not name.startswith(left_out) and (REPOSITORY / name).is_file()]


setup(
    version=VERSION,
    scripts=[PROGRAM],
    ext_modules=[FAST] if IS_WINDOWS == (sys.platform == "win32") else [],
    distclass=Package,
    cmdclass={
        "build_py": BuildPython,
        "build_scripts": BuildProgram,
        "install_data": InstallData,
        "bdist_wheel": PlatformWheel,
        "sdist": WithSources,
    },
)
