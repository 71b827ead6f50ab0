"""The trainer's work in PyTorch: ResNet-18 on noise of 32 pixels, DistributedDataParallel over Gloo.

    torchrun --nproc-per-node 2 docs/training/gloo.py --batch 32 --threads 1 --steps 16

Prints the same figure as speed.py does for the trainer's runs: the median, over the steps after the
third, of the images of all ranks divided by the mean time that the ranks took for the step.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel

arguments = argparse.ArgumentParser()
arguments.add_argument("--batch", type=int, default=32, help="images of a step of each rank")
arguments.add_argument("--threads", type=int, default=1)
arguments.add_argument("--steps", type=int, default=16)
arguments = arguments.parse_args()

torch.set_num_threads(arguments.threads)
torch.manual_seed(1)
dist.init_process_group("gloo")
ranks = dist.get_world_size()
# Each rank has its own running statistics between tests, as in the trainer.
net = torchvision.models.resnet18(num_classes=10)
model = DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loss = torch.nn.CrossEntropyLoss()
images = torch.randn(arguments.batch, 3, 32, 32)
labels = torch.randint(10, (arguments.batch,))
times = []
for step in range(arguments.steps):
    began = time.perf_counter()
    optimizer.zero_grad()
    loss(model(images), labels).backward()
    optimizer.step()
    times.append(time.perf_counter() - began)
of_all = [None] * ranks
dist.all_gather_object(of_all, times)
if dist.get_rank() == 0:
    speeds = [arguments.batch * ranks / statistics.mean(step) for step in zip(*of_all)]
    print(f"{ranks} ranks: {statistics.median(speeds[3:]):.2f} images/s")
dist.destroy_process_group()
