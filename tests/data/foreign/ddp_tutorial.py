# A data-parallel training loop as the public tutorials write it: two linear layers, random data, plain SGD.
# Nothing of this project is imported; it stands for the scripts that users already have.
#
#   torchrun --nproc-per-node 4 ddp_tutorial.py 200
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(1000, 1000)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(1000, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def run(steps):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"Running basic DDP example on rank {rank}.", flush=True)

    torch.manual_seed(0)
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    torch.manual_seed(rank)
    for step in range(steps):
        start = time.time()
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 1000))
        labels = torch.randn(20, 5)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.4f} time {time.time() - start:.3f}s", flush=True)

    dist.destroy_process_group()
    print(f"Finished running basic DDP example on rank {rank}.", flush=True)


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
