"""Every wait is needed: what the engine computes on streams goes wrong without any one of them.

On a process group with NCCL's semantics the same training runs intact, then once without each thing
that a lane orders, then once without the waits of each place in the code. And between two updates
the host never waits for the device, where the strategy does not have to be told a value.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import training_problem as problem
from deferred import DEPENDENCIES
from mutations_cases import CASES, Mutated
from parity_cases import Case
from parity_cases import cases as parity_cases
from processes import Arrays, run_ranks
from training_problem import Schedule

RANK = Path(__file__).with_name("mutations_rank.py")
STEPS = 4
WRONG = {"UnorderedAccess", "ConcurrentCommunicators"}
MOMENTUM = problem.optimizer_of("momentum")

READERS = {
    "unused parameters": "which parameters some rank has reached decides what the optimizer leaves out",
    "sparse": "how many rows every rank sends sizes the buffers",
    "sparse, merged": "how many rows every rank sends sizes the buffers",
    "update by bucket": "whether gradients were changed after their update shows in what they add up to",
    "odd, update by bucket": "whether gradients were changed after their update shows in what they add up to",
    "synchronised batch norm": "the one for CPUs refuses a batch of one value; on CUDA it is torch's own",
}
"""Strategies that observe nothing, and whose values the host needs all the same, with the reason."""

COVERED = {
    "order_lanes": "memory that changes hands between plans: the tickets of the last step were waited for, too",
    "executor.py:wait": "a rank that is in no part of a group waits for what came before, which its own lane orders",
}
"""Places whose waits may be left out, because another wait orders as much, with the reason."""


class Mutations:
    """The contract on one number of ranks."""

    ranks: int

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls) -> list[Arrays]:
        """What every rank saved, all cases from one launch."""
        return run_ranks(RANK, cls.ranks, timeout_s=250.0)

    @pytest.fixture
    def cases(self) -> list[Mutated]:
        """The trainings of this number of ranks."""
        return [case for case in CASES if case.ranks == self.ranks]

    def test_intact_training_is_ordered_and_right(self, results: list[Arrays], cases: list[Mutated]) -> None:
        """With all its waits nothing is unordered, and the parameters are those of loops in one process."""
        for case in cases:
            expected, tolerance = _expected(case)
            for rank in results:
                assert rank[f"{case.name}/intact/violations"].tolist() == [], case.name
                np.testing.assert_allclose(rank[f"{case.name}/intact/parameters"], expected, rtol=0, atol=tolerance, err_msg=case.name)

    @pytest.mark.parametrize("dependency", DEPENDENCIES)
    def test_a_lane_that_forgets_what_it_orders_is_caught(self, results: list[Arrays], cases: list[Mutated], dependency: str) -> None:
        """On every rank, in every training that needs it; the order between tickets only matters between two lanes."""
        for case in cases:
            for rank in results:
                found = set(rank[f"{case.name}/forgets {dependency}/violations"].tolist())
                assert found <= WRONG
                assert bool(found) == (dependency in case.needs), f"{case.name} without {dependency}"

    def test_no_wait_in_the_code_can_be_left_out(self, results: list[Arrays], cases: list[Mutated]) -> None:
        """Every place that waits is missed on some rank, in each training that needs it, but for those that another wait covers."""
        missed: dict[str, int] = {}
        for case in cases:
            sites = results[0][f"{case.name}/survey/sites"].tolist()
            counts = np.sum([rank[f"{case.name}/survey/violations"] for rank in results], axis=0).tolist()
            found = dict(zip(sites, counts, strict=True))
            assert found.pop("") == 0
            for site, count in found.items():
                missed[site] = missed.get(site, 0) + count
        assert {site for site, count in missed.items() if count == 0} == {site for site in missed if any(name in site for name in COVERED)}
        assert len(missed) >= 6

    def test_the_survey_has_met_every_collective(self, results: list[Arrays], cases: list[Mutated]) -> None:
        """Each kind of collective that these trainings use has a wait of its own, which was left out once."""
        sites = " ".join(site for case in cases for site in results[0][f"{case.name}/survey/sites"].tolist())
        expected = {"all_reduce", "spread"} | ({"reduce", "reduce_scatter", "all_gather"} if self.ranks == 4 else set())
        assert all(f":{kind}:" in sites for kind in expected)


@pytest.mark.slow
class TestMutationsOnTwoRanks(Mutations):
    """Buckets on one lane and on two, updates, averagings; and reads by the host."""

    ranks = 2

    @pytest.mark.parametrize("case", [case for case in parity_cases(2) if case.strategy is not None], ids=lambda case: case.name)
    def test_the_host_does_not_wait_inside_a_step(self, results: list[Arrays], case: Case) -> None:
        """A strategy that observes nothing enqueues step after step; one that must be told a value reads it, and then it is seen."""
        for rank in results:
            reads, observes = (rank[f"reads/{case.name}/{name}"].tolist() for name in ("reads", "observes"))
            assert rank[f"reads/{case.name}/others"].tolist() == []
            assert bool(reads) == (bool(observes) or case.name in READERS), reads[:1]


@pytest.mark.whole
class TestMutationsOnFourRanks(Mutations):
    """Two hierarchies of two nodes."""

    ranks = 4


def _expected(case: Mutated) -> tuple[np.ndarray, float]:
    """The parameters after the end of a case's training, and how near they must come."""
    merge = case.strategy.get("gradient_merge_configs", {}).get("k_steps", 1)
    if not case.strategy.get("localsgd"):
        history = problem.joint_training(case.ranks, "float64", MOMENTUM, case.model, merge)
        return history[STEPS - 1].numpy(), 1e-3 if case.strategy.get("fp16_allreduce") else 1e-12
    averages = case.strategy["localsgd_configs"].get("momentum", "local")
    schedule = Schedule({1, 3})
    by_rank = problem.local_training(case.ranks, "float64", MOMENTUM, schedule, kind=case.model, state=averages)
    return torch.mean(by_rank[:, STEPS - 1], dim=0).numpy(), 1e-12
