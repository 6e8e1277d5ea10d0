"""A job of small all-reduces; prints one JSON line for each step and rank."""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from saying import say, wait_at_gate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
parser.add_argument("--pause", type=float, default=0.05)
parser.add_argument("--gate", action="store_true")
parser.add_argument("--elements", type=int, default=1000)
parser.add_argument("--timeout", type=float, default=1800)
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
rank = dist.get_rank()
say(rank=rank, pid=os.getpid())
if options.gate:
    wait_at_gate()
step = 0
try:
    while not options.steps or step < options.steps:
        began = time.monotonic()
        dist.all_reduce(torch.ones(options.elements))
        say(rank=rank, step=step, seconds=round(time.monotonic() - began, 4))
        step += 1
        time.sleep(options.pause)
    dist.barrier()
except RuntimeError as error:
    say(rank=rank, caught=type(error).__name__, text=str(error)[:200])
    time.sleep(2)
    sys.exit(3)
dist.destroy_process_group()
