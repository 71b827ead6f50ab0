"""Builds the compiled part of torch_kolo against the PyTorch of this environment.

cargo builds libkolo.a from the repository around this folder. On a machine without Rust, set
KOLO_LIBRARY=PREFIX/lib/libkolo.a to use an installed library (scripts/install.sh) with its header in
PREFIX/include.

KOLO_FEATURES lists the features of the build; the default is "cuda", and "" means none. Without
"cuda", tensors on GPUs are copied to the host. The backend asks the library at run time.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent

try:
    import torch
except ImportError:
    # pip builds in an environment that hides the target environment, which has the PyTorch to build
    # for.
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        import torch
    except ImportError:
        sys.exit("torch_kolo is built against the PyTorch of this environment, and there is none: pip install torch first")

from torch.utils.cpp_extension import BuildExtension, CppExtension

if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
    sys.exit(f"torch_kolo needs PyTorch 2.11 or newer, and this is {torch.__version__}")


def library():
    """libkolo.a, and the folder with its header."""
    given = os.environ.get("KOLO_LIBRARY")
    if given:
        path = Path(given).resolve()
        if not path.is_file():
            sys.exit(f"KOLO_LIBRARY is {given}, where there is no file")
        for include in (path.parent.parent / "include", REPOSITORY / "include"):
            if (include / "kolo.h").is_file():
                return path, include
        sys.exit(f"there is no kolo.h in {path.parent.parent / 'include'}")
    if not (REPOSITORY / "Cargo.toml").is_file():
        sys.exit("torch_kolo is built inside kolo's repository; elsewhere, set KOLO_LIBRARY to a libkolo.a")
    try:
        features = os.environ.get("KOLO_FEATURES", "cuda")
        subprocess.run(["cargo", "build", "--release", "--package", "kolo-capi", "--features", features], cwd=REPOSITORY, check=True)
    except FileNotFoundError:
        sys.exit("there is no cargo: install Rust, or set KOLO_LIBRARY to a libkolo.a that was built elsewhere")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"cargo could not build kolo (it ended with {failed.returncode})")
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    return REPOSITORY / target / "release" / "libkolo.a", REPOSITORY / "include"


class Build(BuildExtension):
    """Says in the package which PyTorch it is for."""

    def run(self):
        written = Path(self.build_lib) / "torch_kolo"
        if self.editable_mode:
            written = HERE / "src" / "torch_kolo"
        written.mkdir(parents=True, exist_ok=True)
        (written / "_build.py").write_text(f'"""Written by setup.py."""\n\ntorch_version = "{torch.__version__}"\n')
        super().run()


# Libraries that libkolo.a needs. On Linux its symbols stay hidden, so another kolo in the process
# does not clash.
LINKED = ["-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lm"]
if sys.platform == "darwin":
    LINKED = ["-framework", "CoreFoundation", "-lobjc", "-liconv", "-lm"]

archive, include = library()
setup(
    ext_modules=[
        CppExtension(
            name="torch_kolo._C",
            sources=[str(path.relative_to(HERE)) for path in sorted((HERE / "csrc").glob("*.cpp"))],
            depends=[os.path.relpath(path, HERE) for path in [*(HERE / "csrc").glob("*.hpp"), archive, include / "kolo.h"]],
            include_dirs=[str(include)],
            extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            extra_link_args=[str(archive), *LINKED],
        )
    ],
    cmdclass={"build_ext": Build},
)
