"""Training that continues from the last commit after an error within the job."""

import argparse

import torch
import torch.nn.functional as F
from digits import Net, digits, fingerprint
from torch.utils.data import DataLoader

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", default="./data")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=60, help="of all processes together")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batches-per-commit", type=int, default=5)
parser.add_argument("--fail-at", type=int, nargs="*", default=[], help="steps that fail, once each")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + hvd.rank())
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
dataset = digits(args.data_dir, train=True)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=args.batch_size // hvd.size(), sampler=sampler)
failures = set(args.fail_at)
made = 0


def on_state_reset():
    if hvd.rank() == 0:
        print(f"reset: {hvd.size()} processes, {len(sampler)} images of this epoch left for each", flush=True)


@hvd.elastic.run
def train(state):
    global made
    if hvd.rank() == 0:
        print(f"training from epoch {state.epoch}, step {state.step}", flush=True)
    while state.epoch < args.epochs:
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            if state.step in failures:
                failures.remove(state.step)
                raise hvd.HorovodInternalError("as if a peer had been lost")
            optimizer.step()
            made += 1
            state.step += 1
            state.sampler.record_batch(batch_idx, args.batch_size // hvd.size())
            if state.step % args.batches_per_commit == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        state.commit()
    return state.step


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)
state.register_reset_callbacks([on_state_reset])
steps = train(state)

images, labels = digits(args.data_dir, train=False).tensors
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
if hvd.rank() == 0:
    print(f"Accuracy: {100 * accuracy.item():.2f}%")
print(f"rank {hvd.rank()}: {steps} steps, {made} made")
print(f"rank {hvd.rank()}: weights {fingerprint(model)}")
