"""The examples of the page do what it says."""

import doctest
from pathlib import Path

import pykolo
import pytest

OPTIONS = doctest.ELLIPSIS


def test_examples_of_the_page():
    pytest.importorskip("numpy")
    found = doctest.testfile(str(Path(__file__).parent.parent / "README.md"), module_relative=False, optionflags=OPTIONS)
    assert found.attempted > 4 and found.failed == 0


def test_examples_of_the_module():
    found = doctest.testmod(pykolo, optionflags=OPTIONS)
    assert found.attempted > 3 and found.failed == 0


def test_the_program_of_the_page():
    pytest.importorskip("numpy")
    page = (Path(__file__).parent.parent / "README.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    names = {}
    exec(program, names)
    assert names["parts"].tolist() == [[0, 1, 2]]
