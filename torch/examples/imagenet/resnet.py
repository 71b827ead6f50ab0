"""ResNet-18, -34 and -50 without torchvision.

He et al., "Deep Residual Learning for Image Recognition", 2015.
"""

import torch
from torch import nn


class Block(nn.Module):
    """Convolutions with a shortcut: two of 3 x 3, or a bottleneck of 1 x 1, 3 x 3 and 1 x 1."""

    def __init__(self, width_in, waist, stride, narrow):
        super().__init__()
        width_out = waist * 4 if narrow else waist
        shapes = [(width_in, waist, 1, 1), (waist, waist, 3, stride), (waist, width_out, 1, 1)] if narrow else []
        shapes = shapes or [(width_in, waist, 3, stride), (waist, waist, 3, 1)]
        layers = []
        for wide_in, wide_out, size, step in shapes:
            layers += [nn.Conv2d(wide_in, wide_out, size, step, size // 2, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU(inplace=True)]
        self.through = nn.Sequential(*layers[:-1])
        self.around = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.around = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out))

    def forward(self, x):
        return torch.relu(self.through(x) + self.around(x))


def resnet(depths, narrow, num_classes=1000):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, depth in enumerate(depths):
        waist = 64 << stage
        for block in range(depth):
            layers.append(Block(width, waist, 2 if stage > 0 and block == 0 else 1, narrow))
            width = waist * 4 if narrow else waist
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)


def resnet18(num_classes=1000):
    return resnet([2, 2, 2, 2], False, num_classes)


def resnet34(num_classes=1000):
    return resnet([3, 4, 6, 3], False, num_classes)


def resnet50(num_classes=1000):
    return resnet([3, 4, 6, 3], True, num_classes)
