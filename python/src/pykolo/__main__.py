"""``python -m pykolo --prefix`` prints the folder with the C library and its header."""

import argparse

from . import __version__
from ._library import PREFIX


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pykolo", description="Tells where the parts of this package are.")
    parser.add_argument("--prefix", action="store_true", help="print the folder of lib/, include/ and lib/pkgconfig/")
    parser.add_argument("--version", action="version", version=f"pykolo {__version__}")
    arguments = parser.parse_args()
    if not arguments.prefix:
        parser.error("give --prefix, or --version")
    print(PREFIX)


main()
