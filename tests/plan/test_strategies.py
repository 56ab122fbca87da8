"""Strategies: what trainers exchange and when they update, under every field and their combinations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.events import DataEnd, EpochEnd
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import COLLECTIVES, Operations, wire_bytes
from fleetbench.plan.replay import Decider
from fleetbench.plan.training import PLANNED, CollectiveTraining, family
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from plan.contract import drive, flat, run_step

MIB_OF_FLOATS = 2**18


def plan(configured: DistributedStrategy, *, trainers: int = 4, buckets: int = 3, sparse: bool = False) -> Plan:
    """A plan with so many buckets of one gradient of 1 MiB each, and perhaps a sparse one; Adam's state, and batch norm."""
    gradients = [Gradient(name=f"l{index}.weight", numel=MIB_OF_FLOATS, ready=Nanoseconds(index)) for index in range(buckets)]
    if sparse:
        gradients.append(Gradient(name="table.weight", numel=10_000, sparse=True, touched=30, ready=Nanoseconds(buckets)))
    setting = Setting(trainers=trainers, trainers_per_node=2, cost=Cost(latency_ns=0, ns_per_byte=1), num_state_slots=2, buffers_nbytes=80)
    if configured.fuse_all_reduce_ops and configured.fusion == "fleet":
        configured = configured.replace(fuse_grad_size_in_MB=1)
    return build_plan(configured, gradients, setting)


def make(*, trainers: int = 4, buckets: int = 3, sparse: bool = False, **fields: Any) -> CollectiveTraining:
    """The strategy of some fields."""
    configured = DistributedStrategy(broadcast_buffers=False).replace(**fields)
    return family(configured, plan(configured, trainers=trainers, buckets=buckets, sparse=sparse))


def merge(k_steps: int = 3, **configs: Any) -> dict[str, Any]:
    """Fields of gradient merge."""
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **configs}}


def local(k_steps: int = 4, begin_step: int = 1, **configs: Any) -> dict[str, Any]:
    """Fields of Local SGD."""
    return {"localsgd": True, "localsgd_configs": {"k_steps": k_steps, "begin_step": begin_step, **configs}}


def adaptive(variant: str = "fleet", **configs: Any) -> dict[str, Any]:
    """Fields of adaptive Local SGD."""
    chosen = {"init_k_steps": 4, "variant": variant} | ({"alpha": 0.2} if variant == "qsr" else {})
    return {"adaptive_localsgd": True, "adaptive_localsgd_configs": chosen | configs}


LEADER = {"use_hierarchical_allreduce": True}
SCATTER = {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}
EVERYTHING = {"momentum": "average", "buffers": "average"}


def synced(strategy: CollectiveTraining, steps: range) -> list[int]:
    """Steps after which trainers average parameters."""
    decider = Decider.start(strategy, 0, first_step=steps.start)
    return [step for step, events in drive(decider, steps) if any(operation.kind == "merge" for operation in flat(events))]


def exchanged(strategy: CollectiveTraining, steps: range) -> list[int]:
    """Steps in which gradients travel."""
    decider = Decider.start(strategy, 0, first_step=steps.start)
    return [step for step, events in drive(decider, steps) if any(operation.payload in ("gradient", "rows") for operation in flat(events))]


@pytest.mark.parametrize(
    ("fields", "published"),
    [
        (local(4, 1), [1, 5, 9, 13]),
        (local(4, 6), [1, 2, 3, 4, 5, 6, 10, 14]),
        (local(1, 1), list(range(1, 15))),
        (local(3, 2), [1, 2, 5, 8, 11, 14]),
        (local(4, schedule="document"), list(range(1, 15))),  # K = 1 in the first epoch
        (local(4, schedule="document", warmup="const"), [1, 5, 9, 13]),
        (local(4, schedule="torch"), [1, 5, 9, 13]),
        (local(4, 6, schedule="torch"), [6, 10, 14]),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [1, -4])
def test_the_published_steps_of_synchronisation(fields: dict[str, Any], published: list[int], first: int) -> None:
    """Whichever the schedule; a warm-up before step 1 averages after each of its steps, and changes no number."""
    assert synced(make(**fields), range(first, 15)) == [*range(first, 1), *published]


def test_gradient_merge_exchanges_on_every_kth_step_only() -> None:
    """Over 40 steps in fours: exactly 10 exchanges, at 4, 8, ..., 40."""
    strategy = make(**merge(4))
    assert exchanged(strategy, range(1, 41)) == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert exchanged(strategy, range(-4, 41)) == [-4, 0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40]


def test_what_a_merged_step_does() -> None:
    """By hand, two buckets: sums in every step; in the third a release over 3, the exchange, and the update."""
    decider = Decider.start(make(buckets=2, **merge(3)), 0)
    steps = [[[(op.id, op.kind, op.after) for op in operations] for operations in events] for _, events in drive(decider, range(1, 4))]
    assert steps == [
        [[], [(0, "accumulate", ())], [(1, "accumulate", ())], [(2, "skip", ())]],
        [[], [(3, "accumulate", ())], [(4, "accumulate", ())], [(5, "skip", ())]],
        [
            [],
            [(6, "accumulate", ()), (7, "release", ()), (8, "all_reduce", (7,))],
            [(9, "accumulate", ()), (10, "release", ()), (11, "all_reduce", (8, 10))],
            [(12, "update", (11,))],
        ],
    ]


@pytest.mark.parametrize(("avg", "divisors"), [(True, [3, 3, 2]), (False, [1, 1, 1])])
def test_the_sum_is_divided_by_the_steps_in_it(avg: bool, divisors: list[int]) -> None:
    """``avg`` divides by the number of micro-batches, also for the two that an epoch of eight leaves over; off, by nothing."""
    decider = Decider.start(make(buckets=1, **merge(3, avg=avg, remainder="flush")), 0)
    done = flat(operations for _, events in drive(decider, range(1, 9)) for operations in events) + decider.on(0, EpochEnd())
    assert [operation.divisor for operation in done if operation.kind == "release"] == divisors


def test_the_documents_snippet_is_another_algorithm() -> None:
    """It fires on ``batch % k == 0`` from batch 0, so first after one batch; gradient merge first fires after k."""
    snippet = [batch + 1 for batch in range(12) if batch % 4 == 0]
    assert snippet == [1, 5, 9]
    assert exchanged(make(**merge(4)), range(1, 13)) == [4, 8, 12]


@pytest.mark.parametrize(
    ("remainder", "at_the_end", "next_exchanges"),
    [
        ("carry", [], [9, 12, 15]),
        ("drop", ["reset"], [10, 13, 16]),
        ("flush", ["release", "all_reduce", "release", "all_reduce", "update"], [10, 13, 16]),
    ],
)
def test_the_remainder_of_an_epoch(remainder: str, at_the_end: list[str], next_exchanges: list[int]) -> None:
    """Seven steps in threes leave one over: carried on, thrown away, or applied at once."""
    decider = Decider.start(make(buckets=2, **merge(3, remainder=remainder)), 0)
    drive(decider, range(1, 8))
    operations = decider.on(0, EpochEnd())
    assert [operation.kind for operation in operations] == at_the_end
    assert decider.state.updates == (3 if remainder == "flush" else 2)
    assert all(operation.payload == "gradient" for operation in operations if operation.kind == "reset")
    later = [step for step, events in drive(decider, range(8, 17)) if any(operation.payload == "gradient" for operation in flat(events))]
    assert later == next_exchanges
    assert decider.on(0, EpochEnd()) == () or remainder != "carry"


def test_local_sgd_counts_updates() -> None:
    """Three steps an update and K = 2: updates 1, 3, 5, ... average, which end with steps 3, 9, 15, 21; no gradient travels."""
    strategy = make(**local(2), **merge(3))
    assert synced(strategy, range(1, 25)) == [3, 9, 15, 21]
    assert exchanged(strategy, range(1, 25)) == []
    assert synced(strategy, range(-4, 25)) == [-3, 0, 3, 9, 15, 21]


def by_hand_adaptive(losses: list[float], lrs: list[float], k0: int) -> list[int]:
    """Fleet's ``adaptive_localsgd``, begin_step 1, written out: the steps that average."""
    met, k, last = [], k0, 1
    loss0, lr0 = losses[1], lrs[1]
    for step in range(1, len(losses)):
        if step == 1:
            met.append(step)
        elif step - last >= k:
            met.append(step)
            last = step
            k = min(max(math.ceil(math.sqrt(lr0 * losses[step] / (lrs[step] * loss0) * k0)), 1), 16)
    return met


def test_adaptive_steps_follow_a_given_loss() -> None:
    """The steps that average are those of Fleet's loop, written out, for a loss that falls and a learning rate that drops."""
    losses = [0.0, *(2.4 * 0.97**step for step in range(1, 121))]
    lrs = [0.0, *(0.1 if step < 40 else 0.01 if step < 80 else 0.001 for step in range(1, 121))]
    strategy = make(**adaptive("fleet"))
    decider = Decider.start(strategy, 0)
    met = []
    for step in range(1, 121):
        events = run_step(decider, step, lambda name, at: {"loss": losses, "lr": lrs}[name][at])
        if any(operation.kind == "merge" for operation in flat(events)):
            met.append(step)
    expected = by_hand_adaptive(losses, lrs, 4)
    assert len({b - a for a, b in itertools.pairwise(expected)}) >= 4
    assert met == expected


def by_hand_scale(overflows: list[bool]) -> tuple[list[float], list[str]]:
    """Fleet's scaling with its defaults but growth after 3, written out: the scale after each update, and what happens in it."""
    scale, good, bad = 32768.0, 0, 0
    scales, kinds = [], []
    for overflow in overflows:
        if overflow:
            good, bad = 0, bad + 1
            if bad == 2:
                scale, bad = scale * 0.8, 0
        else:
            good, bad = good + 1, 0
            if good == 3:
                scale, good = scale * 2, 0
        scales.append(scale)
        kinds.append("skip" if overflow else "update")
    return scales, kinds


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("combined", [{}, local(2)], ids=["synchronous", "local"])
def test_an_overflow_skips_the_update_and_moves_the_scale(every: int, combined: dict[str, Any]) -> None:
    """The scale and what is skipped are those of Fleet's loop, written out; with gradient merge it counts updates, not steps."""
    overflows = [False, False, True, True, False, True, False, False, False, False, True, False]
    fields = {"amp": True, "amp_configs": {"incr_every_n_steps": 3}, **combined, **(merge(every) if every > 1 else {})}
    decider = Decider.start(make(**fields), 0)
    scales, kinds = [], []
    for step in range(1, every * len(overflows) + 1):
        events = run_step(decider, step, lambda _, at: float(overflows[(at - 1) // every]))
        if step % every == 0:
            assert decider.state.scale is not None
            scales.append(decider.state.scale.value)
            kinds += [operation.kind for operation in flat(events) if operation.kind in ("update", "skip")]
    assert (scales, kinds) == by_hand_scale(overflows)


def test_what_an_averaging_carries_and_in_which_order() -> None:
    """Parameters, the two tensors of the optimizer's state at once, the buffers, each after the one before; then the merge."""
    decider = Decider.start(make(buckets=2, **local(4, **EVERYTHING)), 0)
    operations = flat(run_step(decider, 1))
    assert [(op.id, op.kind, op.payload, op.nbytes, op.after) for op in operations] == [
        (0, "update", None, 0, ()),
        (1, "all_reduce", "delta", 2**20, (0,)),
        (2, "all_reduce", "delta", 2**20, (1,)),
        (3, "all_reduce", "state", 2 * 2**20, (2,)),
        (4, "all_reduce", "state", 2 * 2**20, (3,)),
        (5, "all_reduce", "buffers", 80, (4,)),
        (6, "merge", None, 0, (5,)),
    ]


def test_training_that_ends_within_a_round_averages_first() -> None:
    """Fleet leaves trainers apart; here ``DataEnd`` is a last averaging, and what has agreed stays as it is."""
    for steps, kinds in ((7, ["all_reduce"] * 3 + ["merge"]), (5, [])):
        decider = Decider.start(make(**local(4)), 0)
        drive(decider, range(1, steps + 1))
        assert [operation.kind for operation in decider.on(0, DataEnd())] == kinds


def total_sent(operations: Operations, parts: dict[str, tuple[tuple[int, ...], ...]]) -> int:
    """Bytes sent by all ranks together."""
    return sum(len(part) * wire_bytes(op, len(part)) for op in operations if op.kind in COLLECTIVES for part in parts[op.group])


@pytest.mark.parametrize("fields", [{}, LEADER, SCATTER], ids=["flat", "leader", "reduce_scatter"])
def test_a_step_sends_what_the_closed_forms_say(fields: dict[str, Any]) -> None:
    """Four trainers in two nodes, 3 MiB: a ring sends 2 x 3 S together, and so do both hierarchies: 2 S + 2 S + 2 S."""
    strategy = make(**fields)
    operations = flat(run_step(Decider.start(strategy, 0), 1))
    assert total_sent(operations, strategy.plan.parts) == 6 * 3 * 2**20


def test_what_no_executor_decides_is_refused_by_name() -> None:
    """A changed field outside of what is planned is an error that names it; planned ones pass."""
    refuse_unexecuted(DistributedStrategy().replace(nccl_comm_num=2, **local(), **merge()), "strategy", PLANNED, "sim")
    for fields in ({"auto": True}, {"mode": "ps"}):
        name = next(iter(fields))
        with pytest.raises(ConfigError, match=rf"strategy\.{name}: sim does not execute this field yet"):
            refuse_unexecuted(DistributedStrategy().replace(**fields), "strategy", PLANNED, "sim")
