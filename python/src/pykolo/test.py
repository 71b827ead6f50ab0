"""For the tests of programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._threads import spawn

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._abi import Settings


def ranks(world_size: int, **settings: Unpack[Settings]) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Makes a test of a function: ``@ranks(4)`` calls it in a thread for each of four ranks, with
    the communicator.
    """

    def of(function: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            spawn(world_size, function, **settings)

        # Not functools.wraps: pytest would look for a fixture of the argument's name.
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        # The marks of pytest, and what else decorators have left.
        vars(test).update(vars(function))
        return test

    return of
