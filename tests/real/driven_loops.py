"""A loop of ``plain_loops`` that never ends, in a process that is to attach as its environment says: ``driven_loops.py LOOP``."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from real.attach.following import follow
from real.processes.roles import STORE

for name in ("torch.nn.parallel.distributed", "torch.optim.optimizer"):
    follow(sys.modules[name])
from plain_loops import LOOPS  # noqa: E402  # a script imports the class after that

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.environ[STORE]}.own", rank=rank, world_size=ranks)
loop = LOOPS[sys.argv[1]](rank)
while True:
    loop.run()
