"""Profile legs: the short runs from which a profile is read, and how long they may take.

Three of them per thread count, three more for communication:

- ``layers``: no exchange, every layer timed (``ProfileLeg``);
- ``whole``: training in step, all gradients in one bucket, so that nothing travels beside compute;
- ``several``: training in step, in buckets that travel beside the backward;
- ``averaged``: Local SGD of eight steps, or of two where steps are long, in one bucket: what averaging adds to an update, and
  by how much steps are shorter that wait for nothing before them;
- ``queued`` and ``queued, two in flight``: of two steps, with a bucket a gradient, which queue with no compute
  beside them: what all-reduces of many sizes take, alone and two at once, on one communicator where it
  carries two (``fleetbench.plan.groups``), and else on two;
- ``quantised``, where the strategy sends outer differences in INT8: the same in one bucket, in INT8.

All but ``queued, two in flight`` keep one collective in flight (``sync_nccl_allreduce``).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import compute_part
from fleetbench.quantities import MIB
from fleetbench.result import RunResult, step_times
from fleetbench.strategy import BuildStrategy, DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LINEAR_OPTIMIZERS
from real.job.session import LegSession
from real.layer_times import LEAST_STEPS
from real.leg import Leg
from real.testbed.noise import quietest

STEPS = 100
"""Counted steps of a leg, where the time allows."""
WARMUP = 10
_PILOT = 2
SEVERAL = 8
"""Buckets, about, where there are several."""

T = TypeVar("T")
LegDone = Callable[[], None]


class Legs:
    """Runs legs in a session, each for at most ``seconds`` unless its fewest steps take longer; keeps the runs by name.

    A leg is run again where the machine was busy.
    """

    def __init__(self, session: LegSession, seconds: float, done: LegDone) -> None:
        self.runs: dict[str, RunResult] = {}
        self.foreign_cores: float | None = None
        """During the busiest of the legs that count."""
        self._session = session
        self._seconds = seconds
        self._done = done

    def layers(self, strategy: DistributedStrategy) -> list[dict[str, Any]]:
        """Every rank's layer times, as ``Measured``."""
        leg = Leg(strategy=measured_part(strategy), steps=STEPS, warmup_steps=WARMUP, profile=True, max_s=self._seconds)
        parts = self._quietest(lambda: self._session.run_profile(leg))
        self._done()
        return parts

    def run(self, name: str, strategy: DistributedStrategy, most: int = STEPS) -> RunResult:
        """A run of ``strategy``; a short one before it says how many steps the time allows."""
        pilot = self._session.run(Leg(strategy=strategy, steps=_PILOT, warmup_steps=_PILOT))
        step_s = float(step_times(pilot.steps).max())
        steps = max(LEAST_STEPS, min(most, int(self._seconds / step_s)))
        warmup = max(LEAST_STEPS, min(WARMUP, steps // 4))
        leg = Leg(strategy=strategy, steps=steps, warmup_steps=warmup)
        self.runs[name] = self._quietest(lambda: self._session.run(leg))
        self._done()
        return self.runs[name]

    def averaged(self, strategy: DistributedStrategy, optimizer: str, step_s: float) -> RunResult:
        """Of that name, in rounds of eight steps, where six of them pass in time if a step takes ``step_s``, or else of two."""
        k_steps = 8 if 6 * 8 * step_s <= self._seconds else 2
        return self.run("averaged", averaged(strategy, optimizer, k_steps), 25 * max(4, k_steps))

    def _quietest(self, measure: Callable[[], T]) -> T:
        value, cores = quietest(lambda: (measure(), self._session.foreign_cores), lambda found: found[1])
        if cores is not None:
            self.foreign_cores = max(cores, self.foreign_cores or 0.0)
        return value


def measured_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """The compute part, with the update apart from the backward, so that it can be told from it."""
    build = dataclasses.replace(strategy.build_strategy, enable_backward_optimizer_op_deps=True)
    return compute_part(strategy.replace(build_strategy=build))


def whole(strategy: DistributedStrategy) -> DistributedStrategy:
    """All gradients in one bucket, which is ready with the last of them."""
    return measured_part(strategy).replace(fuse_grad_size_in_MB=0.0)


def several(strategy: DistributedStrategy, table: LayerTable) -> DistributedStrategy:
    """Some buckets of about one size."""
    gradients = [gradient for gradient in table.by_readiness() if not gradient.sparse]
    size_in_mb = sum(gradient.nbytes for gradient in gradients) / SEVERAL / MIB
    return measured_part(strategy).replace(fuse_grad_size_in_MB=size_in_mb, fuse_grad_count=max(2, len(gradients)))


def averaged(strategy: DistributedStrategy, optimizer: str, k_steps: int) -> DistributedStrategy:
    """Local SGD in one bucket, with the update of the strategy; its state is averaged where the optimizer needs that."""
    return _local(strategy, optimizer, k_steps, fuse_grad_size_in_MB=0.0)


def queued(strategy: DistributedStrategy, optimizer: str) -> DistributedStrategy:
    """The same, of two steps, with a bucket a gradient."""
    return _local(strategy, optimizer, fuse_all_reduce_ops=False)


def queued_in_twos(strategy: DistributedStrategy, optimizer: str, backend: str) -> DistributedStrategy:
    """And with two of them in flight."""
    communicators = 1 if queue_depth(backend) > 1 else 2
    return _local(strategy, optimizer, fuse_all_reduce_ops=False, nccl_comm_num=communicators, sync_nccl_allreduce=False)


def quantised(strategy: DistributedStrategy) -> DistributedStrategy:
    """Rounds of two steps with an outer optimizer, in one bucket that travels in INT8."""
    configs = LocalSGDConfigs(k_steps=2, outer_lr=0.7, outer_momentum=0.9, outer_wire="int8")
    return measured_part(strategy).replace(localsgd=True, localsgd_configs=configs, fuse_grad_size_in_MB=0.0)


def _local(strategy: DistributedStrategy, optimizer: str, k_steps: int = 2, **changes: Any) -> DistributedStrategy:
    return DistributedStrategy(
        localsgd=True,
        localsgd_configs=LocalSGDConfigs(k_steps=k_steps, optimizer_state="local" if optimizer in LINEAR_OPTIMIZERS else "average"),
        thread_num=strategy.thread_num,
        build_strategy=BuildStrategy(fuse_all_optimizer_ops=strategy.build_strategy.fuse_all_optimizer_ops),
        **changes,
    )
