"""Scores that torchvision's ResNets give, for the trainer's test of equal scores.

Weights and image are not stored: both sides make them by the same formula, whose every step is exact. `weights MODEL FILE` writes
torchvision's state of such a model as safetensors; without arguments, the committed logits.json is made anew:

    python -m venv venv && venv/bin/pip install torch torchvision safetensors
    venv/bin/python logits.py > logits.json
"""

import json
import sys
import zlib

import numpy
import torch
import torchvision

MODELS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
CLASSES = 10
SIZE = 64


def numbers(name, count):
    """From -0.5 to 0.5, by the name and the place."""
    seed = numpy.uint64(zlib.crc32(name.encode()))
    place = numpy.arange(count, dtype=numpy.uint64)
    mixed = (place * numpy.uint64(2654435761) + seed * numpy.uint64(40503)) % numpy.uint64(1 << 32)
    mixed = (mixed * numpy.uint64(2246822519) >> numpy.uint64(7)) % numpy.uint64(1 << 24)
    return mixed.astype(numpy.float64) / (1 << 24) - 0.5


def values(name, shape):
    count = int(numpy.prod(shape))
    random = numbers(name, count)
    if name.endswith("running_var") or len(shape) == 1 and name.endswith("weight"):
        random = 1.0 + 0.5 * random
    elif len(shape) == 1:
        random = 0.25 * random
    elif len(shape) == 4:
        # A power of 2 is exact.
        random = random * 2.0 ** numpy.round(numpy.log2(4.0 / numpy.sqrt(numpy.prod(shape[1:]))))
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["weights"]:
        from safetensors.torch import save_file

        save_file(model(sys.argv[2]).state_dict(), sys.argv[3])
    else:
        print(json.dumps({name: logits(name) for name in MODELS}))
