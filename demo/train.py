"""An ordinary data-parallel training script: a small byte-level transformer on the Python standard library's own sources.

It knows nothing of the daemon that watches it. Run it as any torch job:

    torchrun --nproc-per-node 4 demo/train.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, LAYERS = 64, 160, 4, 4


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, steps, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, steps, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, steps, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class Model(nn.Module):
    """The next byte from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, time) of bytes to (batch, time, 256) of logits."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places(places))))


def corpus(limit: int = 6_000_000) -> torch.Tensor:
    """The standard library's modules, one after another, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)[:limit]), dtype=torch.uint8)


def batch_of(text: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows and the same shifted by one byte."""
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def tell(step: int, loss: float, seconds: float, as_json: bool) -> None:
    """One line of progress."""
    if as_json:
        print(json.dumps({"step": step, "loss": round(loss, 4), "seconds": round(seconds, 4)}), flush=True)
    else:
        print(f"step {step:5d}   loss {loss:6.3f}   {seconds * 1000:7.0f} ms", flush=True)


def train(options: argparse.Namespace) -> None:
    """The training loop of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    text, generator = corpus(), torch.Generator().manual_seed(options.seed * world + rank + 1)
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{world} ranks, {count / 1e6:.2f} million parameters, {len(text) / 1e6:.1f} MB of text", flush=True)
    started = time.monotonic()
    for step in range(options.steps or 1 << 40):
        begun = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (step + 1) / 20)
        inputs, targets = batch_of(text, options.batch, generator)
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        # The mean loss over the ranks, and rank 0's word whether it is time to stop: all ranks must stop at the same step.
        late = bool(options.seconds) and rank == 0 and time.monotonic() - started >= options.seconds
        shared = torch.tensor([loss.item() / world, float(late)])
        dist.all_reduce(shared)
        if not math.isfinite(shared[0].item()):
            raise RuntimeError(f"the loss is {shared[0].item()} at step {step}")
        if rank == 0 and step % options.every == 0:
            tell(step, shared[0].item(), time.monotonic() - begun, options.json)
        if shared[1].item():
            return


def main() -> None:
    """Parse arguments, join the job, train, leave it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: no limit)")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so many seconds (0: no limit)")
    parser.add_argument("--batch", type=int, default=8, help="windows of each rank and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="print every so many steps")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        train(options)
        # torch's gloo threads drop the last all-reduce's tensors, which takes the interpreter's lock: a rank that exits at that moment
        # ends in std::terminate. A barrier holds no tensors, and by its end the all-reduce is dropped.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
