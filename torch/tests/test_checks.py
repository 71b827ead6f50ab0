"""Every check, at 2 and 3 ranks, and with KOLO_TEST_ALL=1 at 4."""


import checks_collectives  # noqa: F401
import checks_hooks  # noqa: F401
import checks_training  # noqa: F401
import pytest
from harness import CHECKS, EVERY_CASE, IS_WINE, checked, judge, once

OF_TRAINING = [name for name, function in CHECKS.items() if function.__module__ in ("checks_hooks", "checks_training")]
OF_COLLECTIVES = [name for name in CHECKS if name not in OF_TRAINING and name != "detailed_debugging"]


WORLDS = [2, 3, 4] if EVERY_CASE else [2, 3]


@once
def outcomes(world):
    return checked(world, OF_COLLECTIVES if world == 3 or IS_WINE else OF_COLLECTIVES + OF_TRAINING)


@once
def outcomes_with_debugging():
    """With DETAIL, PyTorch first compares each call by Gloo."""
    return checked(2, DEBUGGED, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


# What DETAIL cannot do with any backend is left out: its wrapper does not pass on what profiles
# see, nor sparse tensors; DDP with Gloo crashes.
DEBUGGED = [
    "gathers_of_every_type",
    "all_to_all_with_splits",
    "coalesced_forms",
    "messages",
    "objects",
    "futures",
    "fsdp_equals_gloo",
    "detailed_debugging",
    "no_path_on_devices_is_counted_for_host_memory",
    "groups_that_an_exception_leaves",
    "a_batch_of_messages_that_is_refused",
    "a_callback_that_calls_collectives",
    "callbacks_in_callbacks",
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", OF_COLLECTIVES)
def test_collective(world, name):
    judge(outcomes(world), name)


@pytest.mark.skipif(IS_WINE, reason="these compare with Gloo, which does not start under Wine")
@pytest.mark.parametrize("world", [world for world in WORLDS if world != 3])
@pytest.mark.parametrize("name", OF_TRAINING)
def test_training(world, name):
    judge(outcomes(world), name)


@pytest.mark.parametrize("name", DEBUGGED)
def test_with_detailed_debugging(name):
    judge(outcomes_with_debugging(), name)
