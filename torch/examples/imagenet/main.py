"""Trains a ResNet on ImageNet, with the arguments of PyTorch's example of that name.

    python main.py DIR --arch resnet50 --dist-url file:///shared/store --dist-backend kolo --world-size 1 --rank 0 \\
        --multiprocessing-distributed

DIR has the folders train and val, each with a folder of images for each class; this needs torchvision.
--dummy generates images. There is a rank for each GPU or, without GPUs, --ranks ranks on the CPU.
`--world-size` and `--rank` count hosts with --multiprocessing-distributed, otherwise ranks. Under
torchrun, neither is needed.
"""

import argparse
import os
import sys
import time

import resnet
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

ARCHITECTURES = ["resnet18", "resnet34", "resnet50"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DIR", nargs="?", default="imagenet", help="the data set")
    parser.add_argument("-a", "--arch", default="resnet18", choices=ARCHITECTURES)
    parser.add_argument("-j", "--workers", type=int, default=2, help="processes that load data, for each rank")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="images in a step of all ranks of this host together")
    parser.add_argument("--lr", "--learning-rate", type=float, default=0.1, dest="lr")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", "--weight-decay", type=float, default=1e-4, dest="weight_decay")
    parser.add_argument("-p", "--print-freq", type=int, default=10, help="batches between two lines of output")
    parser.add_argument("--resume", default="", help="the checkpoint to continue from")
    parser.add_argument("--checkpoint", default="checkpoint.pth.tar", help="where rank 0 saves; empty for nowhere")
    parser.add_argument("-e", "--evaluate", action="store_true", help="only evaluates, on the validation set")
    parser.add_argument("--world-size", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--dist-backend", default="kolo")
    parser.add_argument("--seed", type=int, help="makes runs repeatable")
    parser.add_argument("--gpu", type=int, help="the GPU to use; by default, all")
    parser.add_argument("--multiprocessing-distributed", action="store_true", help="starts a rank for each GPU of this host")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on a host without GPUs")
    parser.add_argument("--dummy", action="store_true", help="generated images")
    parser.add_argument("--dummy-images", type=int, default=1_281_167, help="the number of generated images")
    parser.add_argument("--image-size", type=int, default=224)
    return parser.parse_args()


class MadeUp(Dataset):
    """Images of noise. The same index gives the same image."""

    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=noise), index % 1000


def datasets(args):
    if args.dummy:
        return MadeUp(args.dummy_images, args.image_size), MadeUp(min(args.dummy_images, max(1, args.dummy_images // 25)), args.image_size)
    try:
        from torchvision import datasets, transforms
    except ImportError:
        raise SystemExit("reading images needs torchvision: pip install torchvision, or give --dummy") from None
    size = args.image_size
    scaled = [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
    varied = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *scaled])
    plain = transforms.Compose([transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), *scaled])
    train, val = os.path.join(args.data, "train"), os.path.join(args.data, "val")
    return datasets.ImageFolder(train, varied), datasets.ImageFolder(val, plain)


def main():
    args = arguments()
    per_host = torch.cuda.device_count() or args.ranks
    under_launcher = args.dist_url == "env://" and "RANK" in os.environ
    if args.multiprocessing_distributed and not under_launcher:
        try:
            mp.spawn(work, (per_host, args), nprocs=per_host)
        except mp.ProcessExitedException as ended:
            if ended.exit_code != 1:
                raise
            # The rank has said why.
            raise SystemExit(1) from None
    else:
        work(None, 1, args)


def work(local_rank, per_host, args):
    """Trains or evaluates as one rank."""
    distributed = True
    if local_rank is not None:
        hosts, host = max(args.world_size, 1), max(args.rank, 0)
        join(args, host * per_host + local_rank, hosts * per_host)
    elif args.dist_url == "env://" and "RANK" in os.environ:
        local_rank, per_host = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        dist.init_process_group(args.dist_backend)
    elif args.world_size > 1:
        join(args, args.rank, args.world_size)
    else:
        distributed = False
    try:
        train_and_evaluate(local_rank or 0, per_host, distributed, args)
    finally:
        if distributed:
            dist.destroy_process_group()


def join(args, rank, world):
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, rank=rank, world_size=world)


def train_and_evaluate(local_rank, per_host, distributed, args):
    is_first = not distributed or dist.get_rank() == 0
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", args.gpu if args.gpu is not None else local_rank)
        torch.cuda.set_device(device)
    elif distributed:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // per_host))
    if args.seed is not None:
        torch.manual_seed(args.seed)

    model = getattr(resnet, args.arch)().to(device)
    if distributed:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    best = 0.0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        plain(model).load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["scheduler"])
        args.start_epoch, best = saved["epoch"], saved["best"]

    train_set, val_set = datasets(args)
    batch = max(1, args.batch_size // per_host)
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    if not args.evaluate:
        check_there_are_steps(len(train_set) // world, batch, per_host, distributed, args)
    if not len(val_set):
        stop("there is no image to evaluate", distributed)
    loading = {"batch_size": batch, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_sampler = DistributedSampler(train_set, drop_last=True) if distributed else None
    train_data = DataLoader(train_set, shuffle=train_sampler is None, sampler=train_sampler, drop_last=True, **loading)
    # Each image is evaluated once: rank r takes images r, r + world, and so on, and no rank repeats
    # an image.
    val_data = DataLoader(Subset(val_set, range(rank, len(val_set), world)), **loading)

    if args.evaluate:
        evaluate(val_data, model, device, distributed, is_first)
        return
    for epoch in range(args.start_epoch, args.epochs):
        if train_sampler:
            train_sampler.set_epoch(epoch)
        train(train_data, model, optimizer, device, epoch, is_first, args)
        accuracy = evaluate(val_data, model, device, distributed, is_first)
        schedule.step()
        best = max(best, accuracy)
        if is_first and args.checkpoint:
            state = {"epoch": epoch + 1, "arch": args.arch, "state_dict": plain(model).state_dict(), "best": best}
            torch.save({**state, "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}, args.checkpoint)


def check_there_are_steps(images, batch, per_host, distributed, args):
    """Ends the program if a rank has no full batch of training images, or no epoch is left."""
    if images < batch:
        advice = f"give at most --batch-size {images * per_host}" if images else "give more images"
        stop(f"an epoch has no step: each rank has {images} training images, and its batch has {batch}; {advice}", distributed)
    if args.start_epoch >= args.epochs:
        stop(f"there is nothing to train: {args.start_epoch} epochs are done, and --epochs is {args.epochs}", distributed)


def stop(why, distributed):
    """Ends all ranks, which all see the same. The first one says it before any ends."""
    if not distributed or dist.get_rank() == 0:
        print(why, file=sys.stderr, flush=True)
    if distributed:
        dist.barrier()
    raise SystemExit(1)


def plain(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def train(data, model, optimizer, device, epoch, is_first, args):
    model.train()
    began = time.perf_counter()
    seen = 0
    for step, (images, labels) in enumerate(data):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(images)
        if is_first and step % args.print_freq == 0:
            rate = seen / (time.perf_counter() - began)
            print(f"epoch {epoch} step {step}/{len(data)} loss {loss.item():.4f} {rate:.1f} images/s on this rank", flush=True)


@torch.no_grad()
def evaluate(data, model, device, distributed, is_first):
    """The share of images whose class comes first, over all ranks."""
    # Without DDP around it: ranks may have different numbers of batches.
    model = plain(model).eval()
    counts = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in data:
        images, labels = images.to(device), labels.to(device)
        guesses = model(images).topk(5).indices
        hits = guesses == labels[:, None]
        counts += torch.tensor([hits[:, 0].sum(), hits.sum(), len(labels)], dtype=torch.float64, device=device)
    if distributed:
        dist.all_reduce(counts)
    first, among_five, total = counts.tolist()
    if is_first:
        print(f"accuracy: first {first / total:.2%}, among five {among_five / total:.2%}, of {total:.0f} images", flush=True)
    return first / total


if __name__ == "__main__":
    main()
