"""One rank of ddp.py: emulated compute, whose gradients DDP exchanges or fleetbench's engine. Started by ddp.py, not by hand.

Reads requests, one line of JSON each, and answers each with one. Every arm has a model and an optimizer of its own and stays open,
so that arms can take turns; all ranks open and visit them in the same order.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleetbench.config import decode
from fleetbench.plan.layers import declared_table
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.communication.communicators import Communicators
from real.emulated.model import EmulatedModel, EmulatedOptimizer, gradient_value
from real.emulated.pace import Pace, sharpen_sleep
from real.engine.engine import Engine

_TIMEOUT = timedelta(seconds=60)
_LR = 0.01
Request = Mapping[str, Any]


class Arm:
    """Emulated compute, trained step by step. A subclass says who exchanges the gradients."""

    def __init__(self, workload: Workload) -> None:
        self.table = declared_table(workload)
        self.pace = Pace()
        self.model = EmulatedModel(self.table, dist.get_rank(), self.pace)
        self.optimizer = EmulatedOptimizer(self.model.parameters(), lr=_LR, update_ns=self.table.update, pace=self.pace)

    def forward(self) -> torch.Tensor:
        """The output to call ``backward`` on."""
        raise NotImplementedError

    def buckets(self) -> list[int]:
        """Bytes of every bucket, in the order in which they travel."""
        raise NotImplementedError

    def step(self, *, counted: bool) -> None:
        """Forward, backward and update."""
        self.backward(counted=counted)
        self.update()

    def backward(self, *, counted: bool) -> None:
        """The part of a step behind which gradients are averages."""
        self.pace.begin(counted=counted)
        self.forward().backward()

    def update(self) -> None:
        """The rest of it."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def averages(self) -> bool:
        """Whether every element of every gradient is the mean of what the ranks had."""
        parameters, ranks = dict(self.model.named_parameters()), range(dist.get_world_size())
        wanted = {
            gradient.name: sum(gradient_value(rank, position) for rank in ranks) / len(ranks)
            for position, gradient in enumerate(self.table.by_readiness())
        }
        found = {name: parameters[name].grad for name in wanted}
        return all(gradient is not None and bool((gradient == wanted[name]).all()) for name, gradient in found.items())


class Ddp(Arm):
    """DistributedDataParallel over the default group."""

    def __init__(self, workload: Workload, options: Mapping[str, Any], _: Communicators) -> None:
        super().__init__(workload)
        self._wrapped = DistributedDataParallel(self.model, **options)

    def forward(self) -> torch.Tensor:
        """See ``Arm``."""
        return self._wrapped()  # type: ignore[no-any-return]  # Module.__call__ is untyped

    def buckets(self) -> list[int]:
        """As DDP tells them behind its first steps."""
        told = self._wrapped._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")  # noqa: SLF001  # documented, and nothing else tells
        return [int(size) for size in told.split(",") if size.strip()]


class Ours(Arm):
    """fleetbench's engine, as it runs a user's training."""

    def __init__(self, workload: Workload, options: Mapping[str, Any], communicators: Communicators) -> None:
        super().__init__(workload)
        self._engine = Engine(self.model, DistributedStrategy.from_dict(options), communicators, keep_times=False)
        self._engine.attach_optimizer(self.optimizer)

    def forward(self) -> torch.Tensor:
        """See ``Arm``."""
        return self.model()  # type: ignore[no-any-return]  # Module.__call__ is untyped

    def buckets(self) -> list[int]:
        """As planned."""
        return [bucket.nbytes for bucket in self._engine.plan.buckets]


class Rank:
    """What the requests are about."""

    def __init__(self, request: Request) -> None:
        """Join the others."""
        dist.init_process_group(
            "gloo", init_method=f"file://{request['store']}", rank=request["rank"], world_size=request["size"], timeout=_TIMEOUT
        )
        self._workload = decode(request["workload"], Workload, "workload")
        self._communicators = Communicators("gloo", _TIMEOUT)
        self._arms: dict[str, Arm] = {}

    def add(self, request: Request) -> Request:
        """Open an arm, and take its first steps, in which it finds its buckets."""
        kind: type[Ddp | Ours] = {"ddp": Ddp, "ours": Ours}[request["kind"]]
        arm = self._arms[request["arm"]] = kind(self._workload, request["options"], self._communicators)
        for _ in range(request["warmup"]):
            arm.step(counted=False)
        return {"buckets": arm.buckets()}

    def visit(self, request: Request) -> Request:
        """Time an arm's steps, from start to start in microseconds, behind some that are not counted; of the last, check the averages."""
        arm = self._arms[request["arm"]]
        gc.collect()
        gc.disable()
        dist.barrier()
        for _ in range(request["warmup"]):
            arm.backward(counted=False)
            right = arm.averages()
            arm.update()
        stamps = [time.perf_counter_ns()]
        for _ in range(request["steps"]):
            arm.step(counted=True)
            stamps.append(time.perf_counter_ns())
        gc.enable()
        return {"step_us": [(end - begin) // 1000 for begin, end in itertools.pairwise(stamps)], "right": right}

    def lateness(self, _: Request) -> Request:
        """By how much emulated compute was late in the counted steps, by arm."""
        paces = {name: arm.pace for name, arm in self._arms.items()}
        return {name: {"layer": sorted(pace.layers.items()), "step": sorted(pace.steps.items())} for name, pace in paces.items()}


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # gloo prints to the standard output
    torch.set_num_threads(1)
    sharpen_sleep()  # before there are other threads, which inherit it

    def answer(data: Request) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    answer({"ready": True})
    rank = Rank(json.loads(sys.stdin.readline()))
    answer({})
    for line in sys.stdin:
        request = json.loads(line)
        answer({"add": rank.add, "visit": rank.visit, "lateness": rank.lateness}[request["do"]](request))


if __name__ == "__main__":
    main()
