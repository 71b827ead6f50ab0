"""A row-parallel linear layer on kolo: the operator of row_parallel.cpp, its gradient and a module.

The first import compiles row_parallel.cpp with kolo's archive, libkolo.a. KOLO_LIBRARY names a
library beside that; the default is the one that `cargo build --release -p kolo-capi` builds in this
repository.
"""

import math
import os
import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import load

HERE = Path(__file__).resolve().parent


def _compile():
    repository = HERE.parent.parent
    given = os.environ.get("KOLO_LIBRARY")
    archive = (Path(given).resolve().parent if given else repository / "target" / "release") / "libkolo.a"
    if not archive.is_file():
        raise ImportError(f"there is no {archive}: run cargo build --release -p kolo-capi, or set KOLO_LIBRARY=PREFIX/lib/libkolo.so")
    installed = archive.parent.parent / "include"
    include = installed if (installed / "kolo.h").is_file() else repository / "include"
    # On Linux the symbols of the archive stay hidden, so another kolo in the process does not clash.
    of_linux = ["-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lm"]
    of_macos = ["-framework", "CoreFoundation", "-lobjc", "-liconv", "-lm"]
    load(
        name="row_parallel",
        sources=[str(HERE / "row_parallel.cpp")],
        extra_include_paths=[str(include)],
        extra_cflags=["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
        extra_ldflags=[str(archive), *(of_macos if sys.platform == "darwin" else of_linux)],
        is_python_module=False,
    )


_compile()


class Communicator:
    """This rank's membership in the ranks that a launcher started, such as `kolo run`.

    Without a launcher, this process is the only rank. All ranks make the same calls in the same
    order. `timeout` is that of one operation, in seconds; None is KOLO_TIMEOUT.
    """

    def __init__(self, timeout=None):
        self.handle = torch.ops.row_parallel.open(0 if timeout is None else max(1, round(timeout * 1000)))
        self.rank = torch.ops.row_parallel.rank(self.handle)
        self.size = torch.ops.row_parallel.size(self.handle)

    def close(self):
        """Tells the other ranks that this rank has left. Later calls raise ValueError."""
        torch.ops.row_parallel.close(self.handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def part(self, length):
        """Returns this rank's part of a dimension. The parts of the first ranks are longer by one if need be."""
        short, longer = divmod(length, self.size)
        start = self.rank * short + min(self.rank, longer)
        return slice(start, start + short + (self.rank < longer))


def linear(x, weight, communicator, chunk_rows=0):
    """Returns the sum over all ranks of `x @ weight.T`, with the same bits on all ranks.

    The all-reduce of `chunk_rows` rows runs while the next rows are computed. 0 chooses a number, and
    one that is not less than the number of rows means a single all-reduce after the product.
    """
    return torch.ops.row_parallel.linear(x, weight, communicator.handle, chunk_rows)


# torch.compile calls this in place of the operator to learn the shape of the output.
@torch.library.register_fake("row_parallel::linear")
def _fake(x, weight, communicator, chunk_rows):
    torch._check(x.dim() >= 1 and weight.dim() == 2)
    torch._check(x.shape[-1] == weight.shape[1])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, output):
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight)


# The output y = sum over ranks r of x_r @ weight_r.T is the same on all ranks, and so are the loss and
# its gradient g = dL/dy. x_r and weight_r of a rank occur in one term of the sum, so their gradients
# are g @ weight_r and g.T @ x_r: every rank has what they need, and nothing is communicated.
#
# A second derivative is not local: g of all ranks depends on the gradients of each rank.
def _backward(ctx, g):
    if torch.is_grad_enabled():
        raise RuntimeError("row_parallel::linear has no second derivative: call backward() or grad() without create_graph")
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = g @ weight
    if ctx.needs_input_grad[1]:
        rows = math.prod(x.shape[:-1])
        grad_weight = g.reshape(rows, g.shape[-1]).t() @ x.reshape(rows, x.shape[-1])
    return grad_x, grad_weight, None, None


torch.library.register_autograd("row_parallel::linear", _backward, setup_context=_setup_context)


class RowParallelLinear(torch.nn.Module):
    """A torch.nn.Linear whose input features are divided among the ranks.

    Its input is this rank's part of the features, as the output of a column-parallel layer is. Each
    rank has its columns of `whole.weight`, and all of the bias, which is added once after the sum.
    """

    def __init__(self, whole, communicator, chunk_rows=0):
        super().__init__()
        part = communicator.part(whole.in_features)
        self.weight = torch.nn.Parameter(whole.weight.detach()[:, part].clone())
        self.bias = None if whole.bias is None else torch.nn.Parameter(whole.bias.detach().clone())
        self.communicator = communicator
        self.chunk_rows = chunk_rows

    def forward(self, x):
        y = linear(x, self.weight, self.communicator, self.chunk_rows)
        return y if self.bias is None else y + self.bias
