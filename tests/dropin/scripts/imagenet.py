"""A residual network, trained as on ImageNet: warm-up, decay, checkpoints, several batches per step."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
import torch.optim as optim
from digits import digits, fingerprint, resnet8
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser(description="PyTorch ImageNet-like example",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batches-per-allreduce", type=int, default=2,
                    help="batches processed locally before the allreduce; multiplies the batch size")
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=30)
parser.add_argument("--val-batch-size", type=int, default=59)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--decay-epochs", type=int, nargs="+", default=[2, 4, 6])
parser.add_argument("--base-lr", type=float, default=0.025, help="learning rate for a single process")
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
parser.add_argument("--clip", type=float, default=5.0, help="largest norm of the gradients")
parser.add_argument("--workers", type=int, default=0, help="loader processes of each rank")
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--seed", type=int, default=42)


class Metric:
    """Mean of a value over all processes and all updates."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def accuracy(output, target):
    pred = output.max(1, keepdim=True)[1]
    return pred.eq(target.view_as(pred)).cpu().float().mean()


def adjust_learning_rate(epoch, batch_idx):
    """Increase the rate from one process's to all processes' in the first epochs, then decay it by 10."""
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 0.1 ** sum(epoch >= limit for limit in args.decay_epochs)
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch = data[i : i + args.batch_size]
            target_batch = target[i : i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))  # mean over the sub-batches
            loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
    if verbose:
        rate = optimizer.param_groups[0]["lr"]
        print(f"Train Epoch #{epoch + 1}: loss={train_loss.avg.item():.4f}, "
              f"accuracy={100.0 * train_accuracy.avg.item():.2f}, lr={rate:.6f}")


def validate(epoch):
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(accuracy(output, target))
    if verbose:
        print(f"Validate Epoch #{epoch + 1}: loss={val_loss.avg.item():.4f}, "
              f"accuracy={100.0 * val_accuracy.avg.item():.2f}")


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))


if __name__ == "__main__":
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)
    torch.set_num_threads(1)

    # Where to resume? Only the first process needs to see the checkpoints.
    resume_from_epoch = 0
    if hvd.rank() == 0:
        for try_epoch in range(args.epochs, 0, -1):
            if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0,
                                      name="resume_from_epoch").item()
    verbose = 1 if hvd.rank() == 0 else 0
    if verbose:
        print(f"Starting from epoch {resume_from_epoch}")

    train_dataset = digits(args.data_dir, train=True)
    train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    kwargs = {"num_workers": args.workers, "pin_memory": args.cuda}
    train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler, **kwargs)
    val_dataset = digits(args.data_dir, train=False)
    val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    val_loader = DataLoader(val_dataset, batch_size=args.val_batch_size, sampler=val_sampler, **kwargs)

    model = resnet8()
    lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
    if args.cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            lr_scaler = args.batches_per_allreduce * hvd.local_size()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler,
                          momentum=args.momentum, weight_decay=args.wd)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor)

    # The first process restores the checkpoint and sends it to the others.
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from_epoch, args.epochs):
        train(epoch)
        validate(epoch)
        save_checkpoint(epoch)
    print(f"rank {hvd.rank()}: weights {fingerprint(model)}")
