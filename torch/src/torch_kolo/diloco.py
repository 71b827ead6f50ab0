"""DiLoCo: ranks train on their own, and an outer optimizer steps by how far they have come on average.

::

    diloco = DiLoCo(model.parameters(), every=32)
    for inputs in loader:
        ...
        optimizer.step()    # any, on this rank's gradients: without DistributedDataParallel
        diloco.after_step()

Douillard and others: "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. With
KOLO_WIRE_DTYPE=int8 a quarter of the bytes travel between hosts.
"""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["DiLoCo"]


class DiLoCo:
    """Gives all ranks of the group the parameters of its first one, and makes an outer step every
    ``every`` calls of ``after_step``: SGD with Nesterov momentum on the averaged difference since
    the last. ``lr=1`` without momentum is the plain average.
    """

    def __init__(self, parameters, every, lr=0.7, momentum=0.9, group=None):
        if every < 1:
            raise ValueError(f"every is {every}: give the number of steps between two outer steps, at least 1")
        self.parameters, self.every, self.group, self.steps = list(parameters), every, group, 0
        if not self.parameters:
            raise ValueError("there are no parameters")
        # In f32 at least: an outer step may be less than a half can show.
        wide = (parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True) for parameter in self.parameters)
        self.last = [torch.nn.Parameter(tensor) for tensor in wide]
        self.optimizer = torch.optim.SGD(self.last, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.start()

    @torch.no_grad()
    def start(self):
        """Gives all ranks what the first rank of the group has: its parameters and the momentum. All
        ranks call it when ranks have left or come, or have loaded a checkpoint.
        """
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for last in self.last:
            state = self.optimizer.state[last]
            # A newcomer has none.
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(last)
            dist.broadcast(last, first, group=self.group)
            dist.broadcast(state["momentum_buffer"], first, group=self.group)
        steps = torch.tensor([self.steps], device=self.last[0].device)
        dist.broadcast(steps, first, group=self.group)
        self.steps = int(steps)
        self._take()

    @torch.no_grad()
    def after_step(self):
        """Counts a step of the inner optimizer. Returns whether it made an outer step, which all ranks
        make together.
        """
        self.steps += 1
        if self.steps % self.every:
            return False
        moved = [last - parameter for last, parameter in zip(self.last, self.parameters, strict=True)]
        for dtype in {tensor.dtype for tensor in moved}:
            of_type = [tensor for tensor in moved if tensor.dtype == dtype]
            flat = _flatten_dense_tensors(of_type)
            dist.all_reduce(flat, group=self.group)
            flat /= dist.get_world_size(self.group)
            for tensor, average in zip(of_type, _unflatten_dense_tensors(flat, of_type), strict=True):
                tensor.copy_(average)
        for last, average in zip(self.last, moved, strict=True):
            last.grad = average
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._take()
        return True

    def _take(self):
        for last, parameter in zip(self.last, self.parameters, strict=True):
            parameter.copy_(last)

    def state_dict(self):
        """What a checkpoint needs beside the model."""
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict(), "last": [last.detach() for last in self.last]}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        for last, saved in zip(self.last, state["last"], strict=True):
            last.copy_(saved)
