"""The deferred process group on real ranks: right programs compute, and programs that NCCL would break raise.

The programs, with what is wrong about each, are in ``deferred_rank.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from deferred import DEPENDENCIES
from processes import Arrays, run_ranks
from torch import nn

RANK = Path(__file__).with_name("deferred_rank.py")
RANKS = 3

WRONG = {
    "misses_a_wait": "UnorderedAccess",
    "misses_a_wait_through_a_view": "UnorderedAccess",
    "overwrites_what_is_sent": "UnorderedAccess",
    "never_waits": "UnorderedAccess",
    "reads_too_early_where_it_may": "UnorderedAccess",
    "side_stream_without_waiting_for_the_ticket": "UnorderedAccess",
    "update_stream_without_ticket": "UnorderedAccess",
    "update_stream_without_return": "UnorderedAccess",
    "overwrites_what_another_stream_reads": "UnorderedAccess",
    "drops_what_another_stream_reads": "UnorderedAccess",
    "reads_an_item": "HostSynchronised",
    "asks_a_condition": "HostSynchronised",
    "reads_a_list": "HostSynchronised",
    "reads_as_numpy": "HostSynchronised",
    "finds_nonzeros": "HostSynchronised",
    "reads_in_a_gradient_hook": "HostSynchronised",
    "meets_at_a_barrier": "HostSynchronised",
    "serialised": "ConcurrentCommunicators",
    "sends": "NotImplementedError",
}


@pytest.fixture(scope="module")
def results() -> list[Arrays]:
    """What every rank saved."""
    return run_ranks(RANK, RANKS)


def _own(rank: int) -> npt.NDArray[np.float32]:
    return np.arange(8, dtype=np.float32) + 10 * rank


SUM = np.sum([_own(rank) for rank in range(RANKS)], axis=0)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_raises_on_every_rank(results: list[Arrays], name: str) -> None:
    """Each of these programs runs through on gloo, or computes something else there."""
    for rank in results:
        assert str(rank[f"{name}/raised"]) == WRONG[name], rank[f"{name}/message"]


def test_right_programs_compute_the_right_sums(results: list[Arrays]) -> None:
    """Sums by hand: rank r brings 0 to 7 plus ten times r."""
    for number, rank in enumerate(results):
        np.testing.assert_array_equal(rank["waits_and_uses/result"], SUM / RANKS)
        np.testing.assert_array_equal(rank["uses_another_slice/result"], np.concatenate([SUM[:4], _own(number)[4:] + 1]))
        np.testing.assert_array_equal(rank["side_stream/result"], SUM + 2 * _own(number))
        np.testing.assert_array_equal(rank["update_stream/result"], -SUM)
        np.testing.assert_array_equal(rank["drops_it_in_order/result"], 2 * _own(number) + 2)
        np.testing.assert_array_equal(rank["reads_where_it_may/result"], SUM)
        for name in ("free", "in turn"):
            np.testing.assert_array_equal(rank[f"{name}/result"], 2 * SUM)


def test_every_collective_computes_what_its_name_says(results: list[Arrays]) -> None:
    """Reduce, broadcast, reduce-scatter, both all-gathers, a maximum of integers and a mean, by hand."""
    gathered = RANKS * np.arange(2.0 * RANKS)
    expected = [SUM, _own(RANKS - 1), gathered, *(_own(rank) for rank in range(RANKS)), [RANKS - 1] * 3, SUM / RANKS]
    for rank in results:
        np.testing.assert_array_equal(rank["all_kinds/result"], np.concatenate(expected))


def test_a_reduction_is_poison_beside_its_root(results: list[Arrays]) -> None:
    """Torch promises the sum to the root only, so nobody else may build on what is there."""
    assert not results[0]["uses_a_reduction_beside_the_root/result"].any()
    for rank in results[1:]:
        assert rank["uses_a_reduction_beside_the_root/result"].all()


def test_ranks_issue_one_order(results: list[Arrays]) -> None:
    """The kit notes what was issued, so that tests can compare ranks."""
    issued = results[0]["all_kinds/issued"].tolist()
    assert [item.split("'")[3] for item in issued] == [
        "reduce", "broadcast", "reduce_scatter", "all_gather", "all_gather", "all_reduce", "all_reduce"
    ]  # fmt: skip
    for rank in results[1:]:
        assert rank["all_kinds/issued"].tolist() == issued


def test_training_under_a_stream_order_equals_one_process(results: list[Arrays]) -> None:
    """Hooks, a backward, a lane and Adam: the parameters of one process that averages the ranks' gradients itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        losses = [nn.functional.mse_loss(model((torch.arange(8.0).reshape(2, 4) + rank) / 9), torch.ones(2, 2)) for rank in range(RANKS)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    expected = torch.cat([item.detach().reshape(-1) for item in model.parameters()]).numpy()
    for rank in results:
        np.testing.assert_allclose(rank["trains/result"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dependency", DEPENDENCIES)
def test_a_lane_that_forgets_a_dependency_is_caught(results: list[Arrays], dependency: str) -> None:
    """After the submitter, after other tickets, after the collective, after the lane: each is needed."""
    for rank in results:
        assert str(rank[f"forgets {dependency}/raised"]) == "UnorderedAccess"


def test_every_wait_of_the_training_is_needed(results: list[Arrays]) -> None:
    """A survey leaves out the waits of one place in the code after the other, and each time the training goes wrong."""
    for rank in results:
        found = dict(zip(rank["survey of trains/sites"].tolist(), rank["survey of trains/violations"].tolist(), strict=True))
        assert found.pop("") == 0
        assert sorted(site.split(":")[1] for site in found) == ["follow_submitter", "run", "wait"]
        assert all(found.values())


def test_a_survey_asks_every_rank_for_every_ranks_sites(results: list[Arrays]) -> None:
    """A wait that only rank 0 has, and that nobody needs, is left out on all ranks, and is the only one unnoticed."""
    for rank in results:
        sites, violations = rank["survey of lopsided/sites"].tolist(), rank["survey of lopsided/violations"].tolist()
        assert len(sites) == 5
        unnoticed = [site for site, count in zip(sites, violations, strict=True) if count == 0]
        assert [site.split(":")[1:2] for site in unnoticed] == [[], ["lopsided"]]


def test_an_order_that_only_notes_lets_the_program_go_on(results: list[Arrays]) -> None:
    """The sum is right all the same, and everything wrong is listed in its order, what nobody waited for at the end."""
    for rank in results:
        np.testing.assert_array_equal(rank["goes on/result"], SUM / RANKS)
        assert rank["goes on/violations"].tolist() == ["UnorderedAccess", "HostSynchronised", "UnorderedAccess"]
