"""One rank of the mutations: ``mutations_rank.py RANK RANKS STORE OUTPUT``, on the deferred process group.

Trains every case with all its waits, then once without each dependency of its lanes, then once
without the waits of each place in the code, and saves how often each went wrong. Then every
strategy of the parity tests with no read by the host allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import fake_streams
import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from deferred import DEPENDENCIES, FakeStreams, ForgetfulLane, HostSynchronised, StreamOrder, allowed, register, survey
from mutations_cases import Mutated
from mutations_cases import cases as mutated_cases
from parity_cases import Case
from parity_cases import cases as parity_cases
from torch.nn.functional import cross_entropy

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.communication.lanes import Lane, StreamLane
from real.engine.engine import Engine

DTYPE = "float64"
STEPS = 4
SETTLED = 4
"""Steps in which every strategy has had its first update, merged from four at most."""
WATCHED = 8
"""Steps after them: two rounds, or two updates."""
TIMEOUT = timedelta(seconds=60)
Saved = dict[str, Any]


class Forgetting:
    """Makes lanes, and lets those that there are forget a dependency for a while.

    Communicators are made once, because each makes process groups; so a lane looks up here what it is.
    """

    def __init__(self, streams: FakeStreams) -> None:
        self.streams = streams
        self.forgotten: str | None = None

    def __call__(self, _name: str) -> Lane:
        """A lane, whatever its name."""
        return _Switched(self)


class _Switched:
    """A lane that is, at every call, what it is told to be; all are of one stream."""

    def __init__(self, told: Forgetting) -> None:
        self._told = told
        self._intact = StreamLane(told.streams)
        self._forgetful = {dependency: ForgetfulLane(told.streams, dependency) for dependency in DEPENDENCIES}
        for lane in self._forgetful.values():
            lane.stream = self._intact.stream

    def submit(self, operation: Callable[[], None], after: Any) -> Any:
        """See ``Lane``."""
        lane = self._intact if self._told.forgotten is None else self._forgetful[self._told.forgotten]
        return lane.submit(operation, after)

    def close(self) -> None:
        """See ``Lane``."""


def train(strategy: dict[str, Any], communicators: Communicators, model: str = "plain") -> torch.Tensor:
    """Some steps and the end of training; the flat parameters."""
    network = problem.model(DTYPE, model)
    optimizer = problem.optimizer_of("momentum")(network)
    engine = Engine(network, DistributedStrategy.from_dict(strategy), communicators)
    engine.attach_optimizer(optimizer)
    for step in range(1, STEPS + 1):
        problem.decay(optimizer, step)
        inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, DTYPE)
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush(end=True)
    engine.close()
    return problem.flat(network)


def mutate(case: Mutated, communicators: Communicators, lanes: Forgetting) -> Saved:
    """The case intact, then with each of its lanes' dependencies forgotten, then with each of its waits left out."""
    streams, saved = lanes.streams, Saved()
    serialised = case.strategy.get("nccl_comm_num", 1) > 1 and case.strategy.get("sync_nccl_allreduce", True)
    for forgotten in (None, *DEPENDENCIES):
        streams.reset()
        lanes.forgotten = forgotten
        try:
            with StreamOrder(streams, serialised=serialised, raises=False):
                result = train(case.strategy, communicators, case.model)
        finally:
            lanes.forgotten = None
        name = "intact" if forgotten is None else f"forgets {forgotten}"
        saved[f"{name}/violations"] = np.array([type(error).__name__ for error in streams.violations], dtype=str)
        if forgotten is None:
            saved["intact/parameters"] = result.numpy().copy()
    found = survey(streams, lambda: train(case.strategy, communicators, case.model), serialised=serialised)
    saved["survey/sites"] = np.array(list(found))
    saved["survey/violations"] = np.array(list(found.values()))
    return saved


@contextmanager
def no_host_read() -> Iterator[None]:
    """Inside, the host may read nothing, also where the product says that it may."""
    original = fake_streams.host_may_wait
    fake_streams.host_may_wait = lambda: False
    try:
        yield
    finally:
        fake_streams.host_may_wait = original


def without_host_reads(case: Case, communicators: Communicators, streams: FakeStreams) -> Saved:
    """Reads by the host in a case's steps, once its plan is settled: that of the first update is one that all ranks must agree on."""
    assert case.strategy is not None
    dtype = "float32" if "amp" in case.name else DTYPE
    streams.reset()
    reads: list[str] = []
    with StreamOrder(streams, raises=False):
        network = problem.model(dtype, case.model)
        if isinstance(network, problem.Gated):
            network.rank = communicators.rank
        optimizer = problem.optimizer_of(case.optimizer)(network)
        engine = Engine(network, DistributedStrategy.from_dict(case.strategy), communicators)
        engine.attach_optimizer(optimizer)
        for step in range(1, SETTLED + WATCHED + 1):
            inputs, labels = problem.own_batch(step, communicators.rank, communicators.trainers, dtype)
            before = len(streams.violations)
            with no_host_read() if step > SETTLED else nullcontext():
                _step(engine, network, optimizer, inputs, labels)
            reads += [str(error) for error in streams.violations[before:] if isinstance(error, HostSynchronised)]
        observes = engine._decider.strategy.observes
        with allowed():
            engine.close()
    others = [type(error).__name__ for error in streams.violations if not isinstance(error, HostSynchronised)]
    return {"reads": np.array(reads, dtype=str), "others": np.array(others, dtype=str), "observes": np.array(sorted(observes), dtype=str)}


def _step(engine: Engine, network: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(network(inputs), labels)
    engine.report(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Run everything, in one order on all ranks."""
    rank, ranks, store, output = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=TIMEOUT)
    torch.set_num_threads(1)
    streams = FakeStreams()
    register(streams)
    lanes = Forgetting(streams)
    communicators = Communicators("deferred", TIMEOUT, lane=lanes)
    saved: Saved = {}
    for case in mutated_cases(int(ranks)):
        saved |= {f"{case.name}/{name}": value for name, value in mutate(case, communicators, lanes).items()}
    for other in parity_cases(int(ranks)) if int(ranks) == 2 else ():
        if other.strategy is not None:
            saved |= {f"reads/{other.name}/{name}": value for name, value in without_host_reads(other, communicators, streams).items()}
    np.savez(output, **saved)
    dist.barrier()
    communicators.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
