"""What the setup.py of a Python package with kolo's library shares with others: pykolo, torch_kolo.

A package is built inside kolo's repository, or from its source distribution, which has what cargo
needs in the folder `kolo`. KOLO_PLATFORM names the platform of the wheel, in place of this
machine's.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

REPOSITORY = Path(__file__).resolve().parent.parent
# What the wheel is for, such as win_amd64.
PLATFORM = os.environ.get("KOLO_PLATFORM") or sysconfig.get_platform()
SHARED = {"mac": "libkolo.dylib", "win": "kolo.dll"}.get(PLATFORM[:3], "libkolo.so")


def built_by_cargo(*packages):
    """Builds packages of the repository with the features of KOLO_FEATURES. Returns their folder."""
    features = [name for name in os.environ.get("KOLO_FEATURES", "cuda").split(",") if name]
    given = [f"{package}/{name}" for package in packages for name in features]
    command = ["cargo", "build", "--profile", "dist", *(f"--package={package}" for package in packages), "--features", ",".join(given)]
    try:
        subprocess.run(command, cwd=REPOSITORY, check=True)
    except FileNotFoundError:
        sys.exit("there is no cargo: install Rust, or use what was built elsewhere, as the head of setup.py says")
    except subprocess.CalledProcessError as failed:
        sys.exit(f"cargo could not build kolo (it ended with {failed.returncode})")
    return REPOSITORY / os.environ.get("CARGO_TARGET_DIR", "target") / "dist"


def strip(path):
    """Removes what is for debuggers: four fifths of a library. Without `strip` the package is larger."""
    if sys.platform != "win32" and not os.environ.get("KOLO_PLATFORM") and shutil.which("strip"):
        subprocess.run(["strip", "-x" if sys.platform == "darwin" else "--strip-debug", path], check=True)


class WithLibrary(Distribution):
    """Belongs where packages of one platform are, although no module is compiled."""

    def has_ext_modules(self):
        return True


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
    """What cargo needs of the repository, and what the packages share."""
    if not (REPOSITORY / ".git").exists():
        # In a source distribution.
        files = (path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*") if path.is_file())
        return [path for path in files if "target" not in path.parts and "__pycache__" not in path.parts]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    left_out = ("torch/", "python/", ".")
    return [name for name in listed.split("\0") if name and not name.startswith(left_out) and (REPOSITORY / name).is_file()]
