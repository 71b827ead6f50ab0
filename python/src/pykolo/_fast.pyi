"""The module of _fast.c, which not every Python can load."""

from collections.abc import Callable
from typing import Any

def make(
    addresses: dict[str, int],
    methods: dict[str, Callable[..., Any]],
    documentation: dict[str, bytes],
    raise_error: Callable[[int], None],
    array_type: type,
) -> type: ...
def know(array_type: type) -> None: ...
