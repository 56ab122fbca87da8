"""The recursion of bucketed overlap, computed independently, to the nanosecond."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cases import in_ns, layered, link, profiled, with_profile

from fleetbench.plan.build import Plan
from fleetbench.stragglers import ONE, Jitter, SlowRank, draws
from sim.run import simulate

STEPS, WARMUP_STEPS = 3, 1


@dataclass(frozen=True)
class Case:
    """A synchronous run. A layer is its gradients (elements, readiness as a share of the backward), forward and backward."""

    layers: list[tuple[list[tuple[int, Fraction]], int, int]]
    trainers: int
    gbit_per_s: float
    latency_ns: int
    fusion: dict[str, Any]
    stragglers: tuple[Any, ...]
    read_ns: int
    update_ns: int
    seed: int

    @property
    def forward_ns(self) -> int:
        """The whole forward."""
        return sum(forward for _, forward, _ in self.layers)

    @property
    def backward_ns(self) -> int:
        """The whole backward."""
        return sum(backward for _, _, backward in self.layers)

    @property
    def ready_ns(self) -> dict[str, int]:
        """When each gradient is ready, from the start of the backward."""
        return {
            f"layer{index}.p{number}": round(share * self.backward_ns)
            for index, (gradients, _, _) in enumerate(self.layers)
            for number, (_, share) in enumerate(gradients)
        }


def times(limit_ns: int, least_ns: int = 0) -> st.SearchStrategy[int]:
    """Durations."""
    return st.integers(least_ns, limit_ns)


CASES = st.builds(
    Case,
    layers=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(0, 400_000), st.fractions(0, 1)), max_size=3), times(5_000_000), times(5_000_000, 1)),
        min_size=1,
        max_size=6,
    ),
    trainers=st.integers(2, 5),
    gbit_per_s=st.sampled_from([0.5, 3.0, 25.0, 400.0]),
    latency_ns=st.sampled_from([0, 17, 20_000]),
    fusion=st.sampled_from(
        [{"fuse_all_reduce_ops": False}, {"fuse_all_reduce_ops": True}, {"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 0.5}]
    ),
    stragglers=st.sampled_from(
        [(), (Jitter(mean=0.3),), (Jitter(distribution="exponential", mean=1.0), SlowRank(ranks=(0,), factor=1.37))]
    ),
    read_ns=times(10_000),
    update_ns=times(100_000),
    seed=st.integers(0, 2**32),
)


def half_up(value: Fraction) -> int:
    """Rounded to an integer, halves up."""
    return math.floor(value + Fraction(1, 2))


def ring_ns(case: Case, nbytes: int) -> int:
    """2 (P - 1) alpha + 2 ((P - 1) / P) S / B."""
    ranks, bytes_per_ns = case.trainers, Fraction(case.gbit_per_s) / 8
    return half_up(2 * (ranks - 1) * case.latency_ns + Fraction(2 * (ranks - 1), ranks) * nbytes / bytes_per_ns)


def recursion(case: Case, plan: Plan) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """By rank: the starts of its steps, its stalls, and its end.

    start_b = max(max over ranks of ready_b, end_(b-1)); end_b = start_b + T(S_b);
    step = max(end_last, backward_end) + update.
    """
    first = 1 - WARMUP_STEPS
    delays = draws(case.stragglers, case.seed, case.trainers, 1, first, STEPS + WARMUP_STEPS).tolist()
    ranks = range(case.trainers)
    starts: list[list[int]] = [[] for _ in ranks]
    stalls: list[list[int]] = [[] for _ in ranks]
    begin = [0 for _ in ranks]
    for step in range(STEPS + WARMUP_STEPS):
        slowdown = [1 + Fraction(delays[rank][step], ONE) for rank in ranks]
        end = 0
        for bucket in plan.buckets:
            if bucket.numel == 0:  # nothing to carry, and nobody to wait for
                continue
            base_ns = case.forward_ns + max(case.ready_ns[name] for name in bucket.gradients)
            ready = [begin[rank] + case.read_ns + half_up(base_ns * slowdown[rank]) for rank in ranks]
            end = max(*ready, end) + ring_ns(case, bucket.nbytes)
        for rank in ranks:
            backward_end = begin[rank] + case.read_ns + half_up((case.forward_ns + case.backward_ns) * slowdown[rank])
            starts[rank].append(begin[rank])
            stalls[rank].append(max(end, backward_end) - backward_end)
            begin[rank] = max(end, backward_end) + case.update_ns
    return starts, stalls, begin


@given(CASES)
def test_every_step_of_every_rank_is_the_recursion(case: Case) -> None:
    """Random layer tables, with and without stragglers: starts and stalls agree to the nanosecond."""
    spelled = []
    for index, (gradients, forward_ns, backward_ns) in enumerate(case.layers):
        readies = [case.ready_ns[f"layer{index}.p{number}"] for number in range(len(gradients))]
        spelled.append(([numel for numel, _ in gradients], readies, forward_ns, backward_ns))
    experiment, profile = profiled(
        spelled,
        {"read": case.read_ns, "update": case.update_ns},
        nodes=case.trainers,
        inter=link(case.gbit_per_s, case.latency_ns),
        stragglers=case.stragglers,
        strategy=case.fusion,
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        seed=case.seed,
    )
    result = simulate(with_profile(experiment, profile), timeline=False)
    starts, stalls, end = recursion(case, result.plan)
    assert in_ns(result, "start_s") == list(chain.from_iterable(starts))
    assert [round(stall * 1e9) for stall in result.steps["wait_s"] + result.steps["exposed_comm_s"]] == list(chain.from_iterable(stalls))
    assert result.summary.wall_s == pytest.approx((max(end) - min(own[WARMUP_STEPS] for own in starts)) * 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), k_steps=st.sampled_from([1, 3]), communicators=st.sampled_from([1, 2, 3]))
def test_the_parts_of_a_step_add_up(seed: int, k_steps: int, communicators: int) -> None:
    """Forward + backward + wait + exposed + update + other is the time to the next step, and none is negative."""
    local = {"localsgd": True, "localsgd_configs": {"k_steps": k_steps}} if k_steps > 1 else {}
    result = simulate(
        layered(
            [(70_001, 100_000, 200_000), (31, 0, 5), (250_000, 50_000, 90_000)],
            nodes=2,
            trainers_per_node=2,
            intra=link(100, 500),
            inter=link(25, 3_000),
            stragglers=(Jitter(mean=0.4),),
            strategy=local | {"nccl_comm_num": communicators, "sync_nccl_allreduce": False},
            steps=7,
            seed=seed,
        )
    )
    parts = ["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
    assert (result.steps[parts] >= 0).all(axis=None)
    for _, own in result.steps.groupby("rank"):
        lengths = own["start_s"].diff().dropna().to_numpy()
        assert own[parts].sum(axis=1).to_numpy()[:-1] == pytest.approx(lengths, abs=1e-12)
    summary = result.summary
    total = summary.compute_s + summary.wait_s + summary.exposed_comm_s + summary.update_s + summary.other_s
    assert total == pytest.approx(summary.step_s["mean"], rel=1e-12)
