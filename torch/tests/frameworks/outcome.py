"""What the programs in this folder tell test_frameworks.py."""

import json
import os
import sys

PREFIX = "OUTCOME "


def backend_of(group=None):
    """"kolo" or "gloo": whose class is behind the group, whatever the group is called."""
    import torch
    import torch.distributed as dist

    group = group or dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    return "kolo" if "kolo" in f"{type(backend).__module__} {type(backend).__name__} {backend.name()}".lower() else "gloo"


def tell(rank, **values):
    """Prints what this rank found, in one line. Numbers may be tensors of one element."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    sys.stdout.flush()
    # In one call, so that lines of different ranks do not mix.
    os.write(1, f"{PREFIX}{json.dumps({'rank': rank, **plain})}\n".encode())


def told(output):
    """The values that each rank has told, by rank."""
    found = {}
    for line in output.splitlines():
        if PREFIX in line:
            # Launchers print the name of a rank before its lines, and notes after them.
            values, _ = json.JSONDecoder().raw_decode(line[line.index(PREFIX) + len(PREFIX) :])
            found.setdefault(values.pop("rank"), {}).update(values)
    return found
