from __future__ import annotations

from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, build_plan
from fleetbench.plan.cadence import FleetSchedule, cadence_of
from fleetbench.plan.events import BackwardEnd, Flush
from fleetbench.plan.family import PLANNED, family
from fleetbench.plan.layers import Gradient
from fleetbench.plan.local_sgd import LocalSGD
from fleetbench.plan.operations import Operation, wire_bytes
from fleetbench.plan.protocol import Strategy
from fleetbench.plan.replay import Decider
from fleetbench.plan.synchronous import Synchronous
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from plan.contract import StrategyContract, drive

MIB_OF_FLOATS = 2**18


def plan(trainers: int = 4, buckets: int = 3, **fields: Any) -> Plan:
    """A plan with so many buckets of one gradient of 1 MiB each."""
    gradients = [Gradient(name=f"l{index}.weight", numel=MIB_OF_FLOATS, ready=Nanoseconds(index)) for index in range(buckets)]
    return build_plan(DistributedStrategy(fuse_grad_size_in_MB=1, **fields), gradients, trainers)


class TestSynchronous(StrategyContract):
    """One bucket in flight."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Strategy:
        """See the contract."""
        return Synchronous(plan())


class TestSynchronousOnTwoCommunicators(StrategyContract):
    """One bucket in flight per communicator."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Strategy:
        """See the contract."""
        return Synchronous(plan(buckets=5, nccl_comm_num=2, sync_nccl_allreduce=False))


class TestLocalSGD(StrategyContract):
    """K = 4 after step 6."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Strategy:
        """See the contract."""
        return LocalSGD(plan(), FleetSchedule(4, 6))


class TestLocalSGDEveryStep(StrategyContract):
    """K = 1: every step is a round."""

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls) -> Strategy:
        """See the contract."""
        return LocalSGD(plan(nccl_comm_num=2, sync_nccl_allreduce=False), FleetSchedule(1, 1))


def kinds(strategy: Strategy, step_count: int, first: int = 1) -> list[list[str]]:
    """Kinds of the operations of each step's backward end."""
    decider = Decider.start(strategy, 0, first_step=first)
    return [[operation.kind for operation in events[-1]] for _, events in drive(decider, range(first, first + step_count))]


def sync_steps(k_steps: int, begin_step: int, last: int) -> list[int]:
    """Steps behind which trainers average, as the strategy decides."""
    strategy = LocalSGD(plan(), FleetSchedule(k_steps, begin_step))
    return [step for step, what in enumerate(kinds(strategy, last), 1) if "merge" in what]


@pytest.mark.parametrize(
    ("k_steps", "begin_step", "published"),
    [(4, 1, [1, 5, 9, 13]), (4, 6, [1, 2, 3, 4, 5, 6, 10, 14]), (1, 1, list(range(1, 15))), (3, 2, [1, 2, 5, 8, 11, 14])],
)
def test_fleets_schedule_of_synchronisations(k_steps: int, begin_step: int, published: list[int]) -> None:
    """Every step up to begin_step, then k_steps after the last one."""
    assert sync_steps(k_steps, begin_step, 14) == published


def test_warm_up_steps_synchronise() -> None:
    """Steps numbered up to 0 come before begin_step, so each averages."""
    strategy = LocalSGD(plan(), FleetSchedule(4, 1))
    assert ["merge" in what for what in kinds(strategy, 8, first=-2)] == [True, True, True, True, False, False, False, True]


def test_a_step_that_averages_on_request_starts_a_new_round() -> None:
    """Reading the model at step 7 averages, and the next round counts its K steps from there."""
    decider = Decider.start(LocalSGD(plan(), FleetSchedule(4, 1)), 0)
    drive(decider, range(1, 8))
    flushed = decider.on(0, Flush())
    assert [operation.kind for operation in flushed] == ["all_reduce"] * 3 + ["merge"]
    assert flushed[0].after == ()
    assert [step for step, events in drive(decider, range(8, 16)) if len(events[-1]) > 1] == [11, 15]


def test_a_schedule_that_is_not_planned_is_refused() -> None:
    """The other published schedules have names, and are refused by them."""
    strategy = DistributedStrategy().replace(localsgd=True, localsgd_configs={"schedule": "torch"})
    with pytest.raises(ConfigError, match=r"schedule.*torch"):
        cadence_of(strategy)


def test_synchronous_training_exchanges_while_the_backward_runs() -> None:
    """Each bucket's all-reduce starts with its readiness; the update waits for the last of them."""
    decider = Decider.start(Synchronous(plan()), 0)
    ((_, (first, second, third, end)),) = drive(decider, range(1, 2))
    assert [operation.after for operation in (*first, *second, *third)] == [(), (0,), (1,)]
    assert {operation.payload for operation in (*first, *second, *third)} == {"gradient"}
    assert [(operation.kind, operation.after) for operation in end] == [("update", (2,))]


def test_the_update_waits_for_every_communicator() -> None:
    """With free communicators each has a last bucket, and the update waits for all of those."""
    decider = Decider.start(Synchronous(plan(buckets=5, nccl_comm_num=2, sync_nccl_allreduce=False)), 0)
    drive(decider, range(1, 2))
    ((_, events),) = drive(decider, range(2, 3))
    assert events[-1][0].after == (6 + 3, 6 + 4)


def test_local_sgd_updates_first_and_averages_what_came_of_it() -> None:
    """Behind the update the deltas travel; the merge waits for them; no gradient travels."""
    decider = Decider.start(LocalSGD(plan(), FleetSchedule(4, 1)), 0)
    ((_, (*silent, end)),) = drive(decider, range(1, 2))
    assert silent == [(), (), ()]
    assert [(op.id, op.kind, op.after) for op in end] == [
        (0, "update", ()),
        (1, "all_reduce", (0,)),
        (2, "all_reduce", (1,)),
        (3, "all_reduce", (2,)),
        (4, "merge", (3,)),
    ]
    assert {operation.payload for operation in end[1:-1]} == {"delta"}


def test_one_trainer_exchanges_nothing() -> None:
    """Alone, a trainer only updates; a round of Local SGD only merges."""
    assert kinds(Synchronous(plan(trainers=1)), 3) == [["update"]] * 3
    assert kinds(LocalSGD(plan(trainers=1), FleetSchedule(2, 1)), 4) == [["update", "merge"], ["update"], ["update", "merge"], ["update"]]


def test_the_family_is_chosen_by_the_strategy() -> None:
    """``localsgd`` means Local SGD with its schedule; without it trainers meet at every step."""
    assert isinstance(family(DistributedStrategy(), plan()), Synchronous)
    local = family(DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": 4, "begin_step": 6}), plan())
    assert isinstance(local, LocalSGD)
    assert local.cadence == FleetSchedule(4, 6)


def test_what_no_executor_decides_is_refused_by_name() -> None:
    """A changed field outside of what is planned is an error that names it; planned ones pass."""
    refuse_unexecuted(DistributedStrategy(nccl_comm_num=2, fuse_grad_size_in_MB=1), "strategy", PLANNED, "sim")
    with pytest.raises(ConfigError, match=r"strategy\.fp16_allreduce: sim does not execute this field yet"):
        refuse_unexecuted(DistributedStrategy(fp16_allreduce=True), "strategy", PLANNED, "sim")
    changed = DistributedStrategy().replace(localsgd=True, localsgd_configs={"momentum": "average"})
    with pytest.raises(ConfigError, match=r"strategy\.localsgd_configs\.momentum"):
        refuse_unexecuted(changed, "strategy", PLANNED, "sim")


def test_every_planned_name_is_a_field() -> None:
    """A misspelt name in the list would let nothing pass, or the wrong thing."""
    for name in PLANNED:
        value: Any = DistributedStrategy()
        for part in name.removeprefix("strategy.").split("."):
            value = getattr(value, part)


@pytest.mark.parametrize(("nbytes", "ranks", "sent"), [(1000, 2, 1000), (1000, 4, 1500), (1000, 1, 0), (10, 3, 13)])
def test_a_ring_sends_twice_its_share(nbytes: int, ranks: int, sent: int) -> None:
    """2((P-1)/P)S bytes by every rank; operations of a rank send nothing."""
    assert wire_bytes(Operation(id=0, kind="all_reduce", nbytes=nbytes), ranks) == sent
    assert wire_bytes(Operation(id=0, kind="update", nbytes=nbytes), ranks) == 0


def test_backward_ends_without_a_step_are_a_bug() -> None:
    """An executor that forgets StepBegin is told so at once."""
    strategy = LocalSGD(plan(), FleetSchedule(4, 1))
    with pytest.raises(AssertionError):
        strategy.on(strategy.init("trainer", 0), 0, BackwardEnd())
