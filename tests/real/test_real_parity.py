"""Parity: what the engine computes equals DDP, one process with the joint batch, and a written-out loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import training_problem as problem
from processes import Arrays, run_ranks
from torch.nn.functional import cross_entropy

RANK = Path(__file__).with_name("parity_rank.py")
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
TINY = 0.0015  # MiB: less than a layer or two, so that there are several buckets

SYNCHRONOUS = {
    "one bucket": {},
    "several buckets": {"fuse_grad_size_in_MB": TINY},
    "a bucket a gradient": {"fuse_all_reduce_ops": False},
    "by number": {"fusion": "by_number", "fuse_grad_size_in_num": 3, "last_comm_group_size_MB": 0.0005},
    "two communicators in turn": {"fuse_grad_size_in_MB": TINY, "nccl_comm_num": 2},
    "two communicators at once": {"fuse_grad_size_in_MB": TINY, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
}
K_ONE = {"localsgd": True, "fuse_grad_size_in_MB": TINY}
K_FOUR = {"localsgd": True, "localsgd_configs": {"k_steps": 4}, "fuse_grad_size_in_MB": TINY}
SYNC_STEPS = set(range(1, problem.STEPS + 1, 4))  # 1, 5, 9, ..., 49
CASES = ["ddp", *SYNCHRONOUS, "K = 1", "K = 4"]


@pytest.fixture(scope="class", params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    """The type of parameters and gradients."""
    return str(request.param)


class TrainingParity:
    """The contract of every executor of a plan; a subclass says on how many ranks and with which momentum."""

    ranks: int
    momentum: float = 0.9

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls) -> list[Arrays]:
        """What every rank saved, all cases in both types from one launch."""
        strategies = [*SYNCHRONOUS.values(), K_ONE, K_FOUR]
        cases = ["ddp", *(json.dumps(strategy) for strategy in strategies)]
        return run_ranks(RANK, cls.ranks, "float64,float32", str(cls.momentum), *cases)

    def test_equals_one_process_with_the_joint_batch(self, results: list[Arrays], dtype: str) -> None:
        """After 50 steps the parameters are those of one process that saw all ranks' samples."""
        expected = problem.joint_training(self.ranks, dtype, self.momentum).numpy()
        for case in ["ddp", *SYNCHRONOUS]:
            for rank in results:
                np.testing.assert_allclose(_of(rank, dtype, case, "end"), expected, rtol=0, atol=TOLERANCE[dtype], err_msg=case)

    @pytest.mark.parametrize("case", list(SYNCHRONOUS))
    def test_equals_ddp_at_every_step(self, results: list[Arrays], dtype: str, case: str) -> None:
        """The parameters are DistributedDataParallel's, step by step, and the same on every rank to the bit."""
        for rank in results:
            history = _of(rank, dtype, case, "history")
            np.testing.assert_allclose(history, _of(rank, dtype, "ddp", "history"), rtol=0, atol=TOLERANCE[dtype])
            np.testing.assert_array_equal(history, _of(results[0], dtype, case, "history"))

    def test_gradients_are_averages_when_backward_returns(self, results: list[Arrays], dtype: str) -> None:
        """``.grad`` behind the first backward is the joint batch's gradient."""
        network = problem.model(dtype)
        inputs, labels = problem.joint_batch(1, self.ranks, dtype)
        cross_entropy(network(inputs), labels).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters() if parameter.grad is not None])
        for case in SYNCHRONOUS:
            np.testing.assert_allclose(_of(results[0], dtype, case, "gradient"), expected.numpy(), rtol=0, atol=TOLERANCE[dtype])

    def test_buckets_are_those_asked_for(self, results: list[Arrays], dtype: str) -> None:
        """One bucket, several, and one a gradient really are different exchanges."""
        count = {case: int(_of(results[0], dtype, case, "buckets")) for case in SYNCHRONOUS}
        assert count["one bucket"] == 1
        assert count["a bucket a gradient"] == 8
        assert 1 < count["several buckets"] < 8
        assert count["by number"] >= 3

    def test_four_local_steps_equal_the_written_out_loop(self, results: list[Arrays], dtype: str) -> None:
        """At every synchronisation ranks agree to the bit, and with a loop that averages the ranks' models."""
        expected = problem.local_sgd_training(self.ranks, dtype, self.momentum, SYNC_STEPS)
        for step, parameters in expected.items():
            agreed = _of(results[0], dtype, "K = 4", "history")[step - 1]
            np.testing.assert_allclose(agreed, parameters.numpy(), rtol=0, atol=TOLERANCE[dtype])
            for rank in results:
                np.testing.assert_array_equal(_of(rank, dtype, "K = 4", "history")[step - 1], agreed)

    def test_ranks_differ_inside_a_round(self, results: list[Arrays], dtype: str) -> None:
        """Between two synchronisations trainers are alone: their parameters differ."""
        one, other = (_of(rank, dtype, "K = 4", "history") for rank in results[:2])
        for step in set(range(1, problem.STEPS + 1)) - SYNC_STEPS:
            assert not np.array_equal(one[step - 1], other[step - 1])

    def test_training_that_ends_inside_a_round_averages_first(self, results: list[Arrays], dtype: str) -> None:
        """Step 50 is one step into a round: behind the end of training all ranks hold the mean of its parameters."""
        mean = np.mean([_of(rank, dtype, "K = 4", "history")[-1] for rank in results], axis=0)
        for rank in results:
            np.testing.assert_array_equal(_of(rank, dtype, "K = 4", "end"), _of(results[0], dtype, "K = 4", "end"))
            np.testing.assert_allclose(_of(rank, dtype, "K = 4", "end"), mean, rtol=0, atol=TOLERANCE[dtype])


def _of(rank: Arrays, dtype: str, case: str, name: str) -> npt.NDArray[np.generic]:
    return rank[f"{dtype}/{CASES.index(case)}/{name}"]


class TestTwoRanks(TrainingParity):
    """Two trainers with momentum."""

    ranks = 2


class TestFourRanks(TrainingParity):
    """Four trainers with momentum."""

    ranks = 4


class TestThreeRanksOfPlainSGD(TrainingParity):
    """Three trainers, which powers of two would hide, with plain SGD: there K = 1 is synchronous training."""

    ranks = 3
    momentum = 0.0

    def test_averaging_every_step_equals_averaging_gradients(self, results: list[Arrays], dtype: str) -> None:
        """Local SGD with K = 1 under plain SGD is synchronous training."""
        expected = problem.joint_training(self.ranks, dtype, self.momentum).numpy()
        for rank in results:
            np.testing.assert_allclose(_of(rank, dtype, "K = 1", "end"), expected, rtol=0, atol=TOLERANCE[dtype])
