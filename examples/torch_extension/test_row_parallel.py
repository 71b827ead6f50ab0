"""Tests row_parallel.py against torch.nn.functional.linear of the unsplit layer.

    python -m pytest test_row_parallel.py

Ranks are processes that run this file with the names of cases. Most of their time goes into the
import of torch, so one start runs several cases.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

# Only a hang takes this long.
PATIENCE = 300

# Leading dimensions of x, columns of the whole x, columns of y, rows of a chunk.
SHAPES = [
    ((8,), 16, 12, 3),
    ((7,), 13, 5, 2),
    ((2, 3, 5), 9, 7, 4),
    ((), 8, 4, 1),
    ((1,), 64, 33, 0),
    ((0,), 8, 4, 2),
    ((4, 0), 8, 4, 0),
    ((6,), 8, 0, 2),
    ((5,), 3, 4, 2),
    ((300,), 257, 129, 64),
    ((300,), 257, 129, 300),
    ((300,), 257, 129, 1000),
]


def start(cases, world, folder):
    """Starts cases on all ranks."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "KOLO_WORLD_SIZE": str(world), "KOLO_STORE": f"file://{folder}/store"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *cases],
            env={**shared, "KOLO_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(ranks):
    """Returns the exit status of each rank, and what its cases returned."""
    try:
        outputs = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for index, (rank, (_, errors)) in enumerate(zip(ranks, outputs)):
        assert rank.returncode in (0, -signal.SIGKILL), f"rank {index} ended with {rank.returncode}:\n{errors}"
    return [(rank.returncode, json.loads(out.splitlines()[-1]) if out else None) for rank, (out, _) in zip(ranks, outputs)]


def run(cases, world, folder):
    """Returns what each case returned, for each rank."""
    ended = finish(start(cases, world, folder))
    assert all(status == 0 for status, _ in ended)
    return {case: [told[case] for _, told in ended] for case in cases}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the extension before there are ranks with deadlines."""
    subprocess.run([sys.executable, "-c", "import row_parallel"], cwd=Path(__file__).parent, check=True, timeout=PATIENCE)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_layer(world, tmp_path):
    cases = ["unsplit", "gradcheck", "training", "threads", "arguments"]
    told = run(cases + ["compiled_layer"] * (world == 2), world, tmp_path)
    # The digests are of the outputs: they have the same bits on all ranks.
    assert all(rank == told["unsplit"][0] for rank in told["unsplit"])
    assert told["unsplit"][0]["checked"] == 3 * len(SHAPES)
    for case in told.keys() - {"unsplit"}:
        assert told[case] == [True] * world, case


def test_other_shape(tmp_path):
    """A rank with another shape gets an error with both shapes, as the others do. The next call works."""
    told = run(["other_shape"], 2, tmp_path)["other_shape"]
    for kind, message, sum_afterwards in told:
        assert kind == "ValueError"
        assert "on rank 0 the output has 8 rows and 5 columns" in message and "on rank 1 12 rows and 5 columns" in message
        assert sum_afterwards == 2
    assert told[0] == told[1]


def test_other_shape_later(tmp_path):
    """As above after a call on which the ranks agreed: kolo reports the call mismatch."""
    for kind, message in run(["other_shape_later"], 4, tmp_path)["other_shape_later"]:
        assert kind == "DistBackendError"
        assert "rank 3" in message and "all_reduce" in message and "all_gather" in message


def test_killed_rank(tmp_path):
    """The exceptions of the other ranks name the rank that was killed."""
    ended = finish(start(["killed_rank"], 4, tmp_path))
    assert ended[2] == (-signal.SIGKILL, None)
    for status, told in ended[:2] + ended[3:]:
        kind, message = told["killed_rank"]
        assert status == 0 and kind == "DistBackendError"
        assert "rank 2" in message


# The rest runs in the ranks.


def whole_layer(leading, inputs, outputs, dtype):
    """Returns x, weight and the gradient of y, the same on all ranks."""
    import torch

    torch.manual_seed(inputs * 1000 + outputs)
    x = torch.randn(*leading, inputs, dtype=torch.float64)
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    g = torch.randn(*leading, outputs, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), g.to(dtype)


def unsplit(communicator):
    """Outputs and gradients are those of the unsplit layer."""
    import row_parallel
    import torch

    digest = hashlib.sha256()
    checked = 0
    # Each rank rounds its partial sum, so errors grow with the square root of the columns.
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 2e-2)):
        for leading, inputs, outputs, chunk_rows in SHAPES:
            x, weight, g = whole_layer(leading, inputs, outputs, dtype)
            # Not contiguous, as tensors of users often are.
            part = communicator.part(inputs)
            local_x = x[..., part].requires_grad_()
            local_weight = weight[:, part].requires_grad_()
            y = row_parallel.linear(local_x, local_weight, communicator, chunk_rows)
            y.backward(g)

            exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
            exact = torch.nn.functional.linear(exact_x, exact_weight)
            exact.backward(g.double())

            def close(found, expected, length):
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), expected, rtol=error, atol=error * max(length, 1) ** 0.5)

            close(y.detach(), exact.detach(), inputs)
            close(local_x.grad, exact_x.grad[..., part], outputs)
            close(local_weight.grad, exact_weight.grad[:, part], x.shape[:-1].numel())
            digest.update(y.detach().contiguous().view(torch.uint8).numpy().tobytes() if y.numel() else b"")
            checked += 1
    return {"checked": checked, "digest": digest.hexdigest()}


def gradcheck(communicator):
    """Each rank in turn varies its own elements. The others call as often as that rank does."""
    import row_parallel
    import torch

    whole = whole_layer((5,), 9, 3, torch.float64)
    part = communicator.part(9)
    x, weight = whole[0][:, part].clone(), whole[1][:, part].clone()
    one = torch.ones(1, 1, dtype=torch.float64)

    def goes_on(is_going):
        return row_parallel.linear(one, one * is_going, communicator).item() > 0

    def varied(x, weight):
        goes_on(1)
        return row_parallel.linear(x, weight, communicator, chunk_rows=2)

    passed = False
    for rank in range(communicator.size):
        if rank == communicator.rank:
            passed = torch.autograd.gradcheck(varied, (x.clone().requires_grad_(), weight.clone().requires_grad_()))
            goes_on(0)
        else:
            while goes_on(0):
                row_parallel.linear(x, weight, communicator, chunk_rows=2)
    return passed


def compiled_layer(communicator):
    """torch.compile finds what eager mode finds, with its default backend."""
    import row_parallel
    import torch

    torch.manual_seed(1)
    layer = row_parallel.RowParallelLinear(torch.nn.Linear(16, 6), communicator, chunk_rows=3)

    def step(x):
        return torch.relu(layer(x) * 2)

    compiled = torch.compile(step, fullgraph=True)
    for rows in (8, 11):
        x = torch.randn(rows, 16)[:, communicator.part(16)]
        found = {}
        for name, function in (("eager", step), ("compiled", compiled)):
            layer.zero_grad()
            y = function(x)
            y.sum().backward()
            found[name] = [y.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()]
        torch.testing.assert_close(found["compiled"], found["eager"])
    torch.library.opcheck(
        torch.ops.row_parallel.linear.default, (x.clone().requires_grad_(), layer.weight.detach().requires_grad_(), communicator.handle, 3)
    )
    return True


def training(communicator):
    """Some steps of SGD end with the parameters of the unsplit layer."""
    import row_parallel
    import torch

    torch.manual_seed(2)
    whole = torch.nn.Linear(10, 3)
    split = row_parallel.RowParallelLinear(whole, communicator, chunk_rows=4)
    part = communicator.part(10)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in (whole, split)]
    for _ in range(10):
        x, target = torch.randn(9, 10), torch.randn(9, 3)
        for layer, own, optimizer in ((whole, x, optimizers[0]), (split, x[:, part], optimizers[1])):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(layer(own), target).backward()
            optimizer.step()
    torch.testing.assert_close(split.weight, whole.weight[:, part])
    torch.testing.assert_close(split.bias, whole.bias)
    return True


def threads(communicator):
    """Chunks of two threads do not mix. The order of their calls does not matter here: all are equal."""
    import row_parallel
    import torch

    x, weight, _ = whole_layer((64,), 16, 8, torch.float64)
    part = communicator.part(16)
    wrong = []

    def call():
        for _ in range(100):
            y = row_parallel.linear(x[:, part], weight[:, part], communicator, chunk_rows=4)
            if not torch.allclose(y, x @ weight.t()):
                wrong.append(y)

    calling = [threading.Thread(target=call) for _ in range(2)]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join()
    return not wrong


def arguments(communicator):
    """Wrong arguments are errors before anything is sent."""
    import row_parallel
    import torch

    def refuses(words, call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error with {words}")

    x, weight = torch.randn(4, 3), torch.randn(2, 3)
    refuses("x has 3 columns and weight 2", lambda: row_parallel.linear(x, weight[:, :2], communicator))
    refuses("weight of 2, not 2 and 1", lambda: row_parallel.linear(x, weight[0], communicator))
    refuses("x is of Float and weight of Double", lambda: row_parallel.linear(x, weight.double(), communicator))
    refuses("not Int", lambda: row_parallel.linear(x.int(), weight.int(), communicator))
    refuses("cannot be negative", lambda: row_parallel.linear(x, weight, communicator, -1))
    x.requires_grad_()
    y = row_parallel.linear(x, weight, communicator)
    refuses("no second derivative", lambda: torch.autograd.grad(y.sum(), x, create_graph=True))
    closed = row_parallel.Communicator.__new__(row_parallel.Communicator)
    closed.handle = communicator.handle + 1
    refuses("there is no communicator", lambda: row_parallel.linear(x, weight, closed))
    return True


def failure(call):
    """Returns the type and the message of the exception."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def other_shape(communicator):
    """2 and 3 chunks, which begin alike."""
    import row_parallel
    import torch

    rows = 8 if communicator.rank == 0 else 12
    told = failure(lambda: row_parallel.linear(torch.ones(rows, 3), torch.ones(5, 3), communicator, chunk_rows=4))
    one = torch.ones(1, 1)
    return [*told, row_parallel.linear(one, one, communicator).item()]


def other_shape_later(communicator):
    import row_parallel
    import torch

    def call(rows):
        return row_parallel.linear(torch.ones(rows, 3), torch.ones(5, 3), communicator, chunk_rows=4)

    call(8)
    call(8)
    return failure(lambda: call(12 if communicator.rank == 3 else 8))


def killed_rank(communicator):
    import row_parallel
    import torch

    x, weight = torch.ones(512, 64), torch.ones(256, 64)
    row_parallel.linear(x, weight, communicator, chunk_rows=8)
    if communicator.rank == 2:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def calls():
        while True:
            row_parallel.linear(x, weight, communicator, chunk_rows=8)

    return failure(calls)


if __name__ == "__main__":
    import row_parallel as extension

    with extension.Communicator(timeout=60) as ours:
        print(json.dumps({case: globals()[case](ours) for case in sys.argv[1:]}))
