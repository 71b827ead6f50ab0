"""PyTorch's short forms of calls on a process group: `group.broadcast(tensor, root=1)` for
`group.broadcast([tensor], options)`.
"""

import torch

FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def options(kind, given, short, first=None):
    """The options of a call. `short` has what is given by name in place of options; `given` may be
    the value that is named `first`.
    """
    if isinstance(given, kind):
        return given
    made = kind()
    if given is not None:
        short = {first or "timeout": given, **short}
    for name, value in short.items():
        if name not in FIELDS:
            raise TypeError(f"there is no argument {name}")
        setattr(made, FIELDS[name], value)
    return made


def listed(tensors):
    """A tensor stands for a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(tensors):
    """A list of tensors stands for a list of one list."""
    return [tensors] if tensors and isinstance(tensors[0], torch.Tensor) else tensors
