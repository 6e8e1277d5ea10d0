"""Every collective of gloo, with sizes that tell them apart; waits at the gate first, and leaves by a barrier."""

import os
import time

import torch
import torch.distributed as dist
from saying import say, wait_at_gate

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
say(rank=rank, pid=os.getpid())
wait_at_gate()
dist.all_reduce(torch.ones(1000))
dist.broadcast(torch.ones(500, dtype=torch.float64), 0)
dist.all_gather([torch.zeros(300) for _ in range(world)], torch.ones(300))
dist.reduce(torch.ones(700), 0)
dist.gather(torch.ones(250), [torch.zeros(250) for _ in range(world)] if rank == 0 else None, 0)
dist.scatter(torch.zeros(260), [torch.ones(260) for _ in range(world)] if rank == 0 else None, 0)
dist.all_to_all_single(torch.zeros(8 * world), torch.ones(8 * world))
widths = [16, 32, 48]
dist.all_to_all_single(torch.zeros(widths[rank] * world), torch.ones(sum(widths)), [widths[rank]] * world, widths)
if rank == 0:
    dist.send(torch.ones(123), 1)
if rank == 1:
    dist.recv(torch.zeros(123), 0)
pair = dist.new_group([0, 1])
if rank < 2:
    for _ in range(3):
        dist.all_reduce(torch.ones(10), group=pair)
dist.barrier()
say(rank=rank, done=True)
time.sleep(3)
dist.destroy_process_group()
