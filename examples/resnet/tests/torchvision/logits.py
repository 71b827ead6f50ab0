"""Scores that torchvision's ResNets give, for the trainer's test of equal scores.

Weights and images are not stored: both sides make them by the same formula, whose every step is exact. `weights MODEL FILE` writes
torchvision's state of such a model as safetensors, `same MODEL FILE` says whether a file holds the same, `scores MODEL` gives one
model's scores; without arguments, the committed logits.json is made anew:

    python -m venv venv && venv/bin/pip install torch torchvision safetensors
    venv/bin/python logits.py > logits.json
"""

import json
import math
import sys

import numpy
import safetensors.torch
import torch
import torchvision

MODELS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
CLASSES = 10
SIZE = 64


def numbers(name, count):
    """From -0.5 to 0.5, by the name (FNV-1a) and the place."""
    seed = 2166136261
    for byte in name.encode():
        seed = (seed ^ byte) * 16777619 % (1 << 32)
    place = numpy.arange(count, dtype=numpy.uint64)
    mixed = (place * numpy.uint64(2654435761) + numpy.uint64(seed * 40503)) % numpy.uint64(1 << 32)
    mixed = (mixed * numpy.uint64(2246822519) >> numpy.uint64(7)) % numpy.uint64(1 << 24)
    return mixed.astype(numpy.float64) / (1 << 24) - 0.5


def values(name, shape):
    count = math.prod(shape)
    random = numbers(name, count)
    if name.endswith("running_var") or len(shape) == 1 and name.endswith("weight"):
        random = 1.0 + 0.5 * random
    elif len(shape) == 1:
        random = 0.25 * random
    elif len(shape) == 4:
        # About 4 by the root of the connections that come in. A power of 2 is exact.
        random = random * 2.0 ** (2 - (math.prod(shape[1:]).bit_length() - 1) // 2)
    return torch.from_numpy(random.astype(numpy.float32).reshape(shape))


def model(name):
    net = getattr(torchvision.models, name)(num_classes=CLASSES)
    state = net.state_dict()
    net.load_state_dict({key: old if old.dim() == 0 else values(key, tuple(old.shape)) for key, old in state.items()})
    return net.eval()


def logits(name):
    image = values("images", (2, 3, SIZE, SIZE)) * 4
    with torch.no_grad():
        return model(name)(image).double().tolist()


def main(what="all", name=None, file=None):
    if what == "weights":
        safetensors.torch.save_file(model(name).state_dict(), file)
    elif what == "same":
        net, expected = getattr(torchvision.models, name)(num_classes=CLASSES), model(name).state_dict()
        net.load_state_dict(safetensors.torch.load_file(file), strict=False)
        same = all(torch.equal(value, expected[key]) for key, value in net.state_dict().items())
        print("same" if same else "different")
    elif what == "scores":
        print(json.dumps(logits(name)))
    else:
        print(json.dumps({name: logits(name) for name in MODELS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
