"""Parity: what the engine computes equals DDP, one process with the joint batch, and written-out loops.

On gloo, and again on a process group with NCCL's semantics, where whatever is touched before it was
waited for is an error.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import training_problem as problem
from parity_cases import GATED, HIERARCHICAL, MERGED, NORMED, ODD, ON_TWO_RANKS, OVERFLOW, SCALED, SPARSE, SYNCHRONOUS, WIRE, Case
from processes import Arrays, run_ranks
from torch.nn.functional import cross_entropy
from training_problem import Schedule

RANK = Path(__file__).with_name("parity_rank.py")
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}
MOMENTUM = problem.optimizer_of("momentum")
STEPS = problem.STEPS
FOUR = set(range(1, STEPS + 1, 4))


@functools.cache
def _launch(ranks: int, backend: str, dtypes: str, which: str = "all") -> list[Arrays]:
    return run_ranks(RANK, ranks, backend, dtypes, which)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test in every type that its class is tried in."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", metafunc.cls.dtypes.split(","))


class TrainingParity:
    """The contract of every executor of a plan; a subclass says on how many ranks, in which types and over which backend."""

    ranks: int
    backend = "gloo"
    dtypes = "float64"
    sampled = False
    """Whether a fixed sample of the cases is trained, which two ranks train all."""

    @pytest.fixture(scope="class")
    @classmethod
    def results(cls) -> list[Arrays]:
        """What every rank saved, all cases from one launch."""
        return _launch(cls.ranks, cls.backend, cls.dtypes, "sample" if cls.sampled else "all")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> list[Arrays]:
        """The launch over gloo, which has DDP's results."""
        return _launch(cls.ranks, "gloo", cls.dtypes, "sample" if cls.sampled and cls.ranks > 2 else "all")

    @property
    def synchronous(self) -> tuple[Case, ...]:
        """The cases that equal one process with the joint batch."""
        return self.trained((*SYNCHRONOUS, *HIERARCHICAL) if self.ranks == 4 else SYNCHRONOUS)

    def trained(self, cases: tuple[Case, ...]) -> tuple[Case, ...]:
        """Those of them that are trained."""
        return tuple(case for case in cases if not (self.sampled and case.name in ON_TWO_RANKS))

    def test_equals_one_process_with_the_joint_batch(self, results: list[Arrays], dtype: str) -> None:
        """At every step the parameters are those of one process that saw all ranks' samples."""
        expected = problem.joint_training(self.ranks, dtype, MOMENTUM).numpy()
        for case in self.synchronous:
            _agree(results, dtype, case.name, expected)

    def test_equals_ddp_at_every_step(self, results: list[Arrays], reference: list[Arrays], dtype: str) -> None:
        """The parameters are DistributedDataParallel's, step by step, also of a model that trips up reducers."""
        for case in (*self.synchronous, *self.trained(ODD)):
            _agree(results, dtype, case.name, _of(reference[0], dtype, f"ddp {case.model}", "history"))

    def test_unused_parameters_are_left_alone_as_ddp_leaves_them(self, results: list[Arrays], reference: list[Arrays], dtype: str) -> None:
        """A branch that some ranks take, and one that none takes in every other step, with momentum and weight decay."""
        for case in GATED:
            _agree(results, dtype, case.name, _of(reference[0], dtype, "ddp gated", "history"))

    def test_a_small_wire_rounds_as_ddps_hooks_do(self, results: list[Arrays], reference: list[Arrays], dtype: str) -> None:
        """FP16 and BF16 on the wire give the parameters of DDP with a hook that divides and casts, and not those of full precision.

        Two summands have one sum. Of more, a ring's order depends on where a gradient lies in its bucket.
        """
        for case, rounding in zip(WIRE, (1e-4, 1e-3), strict=True):
            tolerance = TOLERANCE[dtype] if self.ranks == 2 else rounding
            _agree(results, dtype, case.name, _of(reference[0], dtype, f"ddp {case.name[:4]}", "history"), tolerance)
            exact = problem.joint_training(self.ranks, dtype, MOMENTUM).numpy()[: case.steps]
            assert np.abs(_of(results[0], dtype, case.name, "history") - exact).max() > 1e-6

    def test_gradients_are_averages_when_backward_returns(self, results: list[Arrays], dtype: str) -> None:
        """``.grad`` after the first backward is the joint batch's gradient."""
        network = problem.model(dtype)
        inputs, labels = problem.joint_batch(1, self.ranks, dtype)
        cross_entropy(network(inputs), labels).backward()
        expected = torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters() if parameter.grad is not None])
        for case in self.synchronous:
            np.testing.assert_allclose(_of(results[0], dtype, case.name, "gradient"), expected.numpy(), rtol=0, atol=TOLERANCE[dtype])

    def test_sparse_gradients_add_up_rows(self, results: list[Arrays], dtype: str) -> None:
        """An embedding whose ranks touch different rows trains as in one process, every step and with merged ones."""
        for case, merge in zip(SPARSE, (1, 2), strict=True):
            _agree(
                results, dtype, case.name, problem.joint_training(self.ranks, dtype, problem.optimizer_of("sgd"), "looked", merge).numpy()
            )

    def test_merged_steps_are_one_larger_batch(self, results: list[Arrays], dtype: str) -> None:
        """K steps share an update: that of one process with k joint batches, averaged, or summed."""
        for case in self.trained(MERGED):
            merge, average = (2, False) if "sum" in case.name else (4, True)
            expected = problem.joint_training(self.ranks, dtype, MOMENTUM, merge=merge, average=average).numpy()
            _agree(results, dtype, case.name, expected)

    def test_merged_steps_exchange_on_the_last_one_only(self, results: list[Arrays], dtype: str) -> None:
        """The all-reduces that torch was asked for are the buckets' of every k-th step, and no more."""
        for case in self.trained(MERGED):
            merge = 2 if "sum" in case.name else 4
            buckets = int(_of(results[0], dtype, case.name, "buckets"))
            counted = int(_of(results[0], dtype, case.name, "collectives"))
            assert counted == STEPS // merge * buckets

    @pytest.mark.parametrize(
        ("case", "updates", "merge"),
        [
            ("K = 1", set(range(1, STEPS + 1)), 1),
            ("K = 4", FOUR, 1),
            ("K = 4, fused update", FOUR, 1),
            ("K = 3 from 6", {1, 2, 3, 4, 5, 6, 9}, 1),
            ("document, K = 4", FOUR, 1),
            ("torch, K = 4", FOUR, 1),
            ("K = 2, merge of 3", {1, 3}, 3),
        ],
    )
    def test_local_sgd_equals_the_written_out_loop(
        self, results: list[Arrays], dtype: str, case: str, updates: set[int], merge: int
    ) -> None:
        """At every step every rank holds what a loop that averages the ranks' models gives it."""
        self._skip_what_is_not_trained(case)
        expected = problem.local_training(self.ranks, dtype, MOMENTUM, Schedule(updates), merge=merge)
        self._agree_by_rank(results, dtype, case, expected, {update * merge for update in updates})

    def test_local_sgd_trains_what_trips_up_a_reducer(self, results: list[Arrays], dtype: str) -> None:
        """Types mixed, an empty parameter, one that is a view of a buffer, batch norm: as the written-out loop."""
        expected = problem.local_training(self.ranks, dtype, MOMENTUM, Schedule(FOUR), kind="odd")
        self._agree_by_rank(results, dtype, "K = 4, odd", expected, FOUR, tolerance=2e-6)  # one parameter is float32

    @pytest.mark.parametrize(
        ("case", "optimizer", "state"),
        [
            ("K = 4, momentum reset", "momentum", "reset"),
            ("K = 4, momentum averaged", "momentum", "average"),
            ("K = 4, momentum averaged, fused", "momentum", "average"),
            ("K = 4, Adam averaged", "adam", "average"),
        ],
    )
    def test_the_optimizers_state_is_treated_as_said(
        self, results: list[Arrays], dtype: str, case: str, optimizer: str, state: str
    ) -> None:
        """Momentum that is cleared or averaged with the parameters, and Adam's two moments averaged."""
        self._skip_what_is_not_trained(case)
        expected = problem.local_training(self.ranks, dtype, problem.optimizer_of(optimizer), Schedule(FOUR), state=state)
        self._agree_by_rank(results, dtype, case, expected, FOUR, tolerance=20 * TOLERANCE[dtype])
        plain = problem.local_training(self.ranks, dtype, problem.optimizer_of(optimizer), Schedule(FOUR))
        assert (plain - expected).abs().max() > 1e-4

    def test_adaptive_steps_follow_the_averaged_loss(self, results: list[Arrays], dtype: str) -> None:
        """K from the trainers' averaged loss and the learning rate, which falls in the middle: as the written-out loop."""
        schedule = Schedule(k=2, begin=2)
        met: list[int] = []
        schedule.met = lambda update, loss, lr: (met.append(update), Schedule.met(schedule, update, loss, lr))[1]  # type: ignore[method-assign]
        expected = problem.local_training(self.ranks, dtype, MOMENTUM, schedule)
        assert len({later - earlier for earlier, later in itertools.pairwise(met)}) > 2
        self._agree_by_rank(results, dtype, "adaptive, K0 = 2", expected, set(met))

    def test_buffers_are_averaged_where_asked(self, results: list[Arrays], dtype: str) -> None:
        """Batch-norm statistics are the same on every rank after an averaging of buffers, and counts are whole."""
        name = "K = 4, buffers averaged"
        expected = problem.local_training(self.ranks, dtype, MOMENTUM, Schedule(FOUR), kind="normed", buffers=True)
        self._agree_by_rank(results, dtype, name, expected, FOUR)
        buffers = [_of(rank, dtype, name, "buffers") for rank in results]
        for other in buffers[1:]:
            np.testing.assert_array_equal(other, buffers[0])
        assert buffers[0][-1] == STEPS

    def test_ranks_differ_inside_a_round(self, results: list[Arrays], dtype: str) -> None:
        """Between two synchronisations trainers are alone: their parameters differ."""
        one, other = (_of(rank, dtype, "K = 4", "history") for rank in results[:2])
        for step in set(range(1, STEPS + 1)) - FOUR:
            assert not np.array_equal(one[step - 1], other[step - 1])

    def test_training_that_ends_inside_a_round_averages_first(self, results: list[Arrays], dtype: str) -> None:
        """The last step is one into a round: after the end of training all ranks hold the mean of its parameters."""
        mean = np.mean([_of(rank, dtype, "K = 4", "history")[-1] for rank in results], axis=0)
        for rank in results:
            np.testing.assert_array_equal(_of(rank, dtype, "K = 4", "end"), _of(results[0], dtype, "K = 4", "end"))
            np.testing.assert_allclose(_of(rank, dtype, "K = 4", "end"), mean, rtol=0, atol=TOLERANCE[dtype])

    def test_buckets_are_those_asked_for(self, results: list[Arrays], dtype: str) -> None:
        """One bucket, several, and one a gradient really are different exchanges, of as many all-reduces."""
        count = {case.name: int(_of(results[0], dtype, case.name, "buckets")) for case in self.trained(SYNCHRONOUS)}
        assert count["one bucket"] == 1
        assert count["a bucket a gradient"] == 8
        assert 1 < count["several buckets"] < 8
        assert count.get("by number", 3) >= 3
        for case in SYNCHRONOUS[:3:2]:
            assert int(_of(results[0], dtype, case.name, "collectives")) == case.steps * count[case.name]

    def test_an_overflow_on_one_rank_skips_the_update_on_all(self, results: list[Arrays]) -> None:
        """Rank 1 overflows in one step: no rank moves in that update, all scale down alike, and training goes on."""
        for case in self.trained(SCALED):
            merge = 2 if "merge" in case.name else 1
            for rank in results:
                history = _of(rank, "float32", case.name, "history")
                scales = _of(rank, "float32", case.name, "scales")
                moved = [not np.array_equal(history[step], history[step - 1]) for step in range(1, STEPS)]
                expected = [(step + 1) % merge == 0 and step + 1 != OVERFLOW for step in range(1, STEPS)]
                assert moved == expected, case.name
                assert list(scales[: OVERFLOW - 1]) == [128.0] * (OVERFLOW - 1)
                np.testing.assert_allclose(scales[OVERFLOW - 1 :], 128.0 * 0.8)

    def test_scaled_training_stays_near_full_precision(self, results: list[Arrays]) -> None:
        """Up to the overflow FP16 forwards with a scaled loss train as FP32 does, within FP16's resolution."""
        expected = problem.joint_training(self.ranks, "float32", MOMENTUM).numpy()
        history = _of(results[0], "float32", SCALED[0].name, "history")
        start = np.abs(expected[OVERFLOW - 2] - expected[0]).max()
        assert np.abs(history[: OVERFLOW - 1] - expected[: OVERFLOW - 1]).max() < 0.02 * start

    def _skip_what_is_not_trained(self, case: str) -> None:
        if self.sampled and case in ON_TWO_RANKS:
            pytest.skip("SKIPPED: two ranks train it; `make test SLOW=--whole` trains it on more")

    def _agree_by_rank(
        self, results: list[Arrays], dtype: str, case: str, expected: torch.Tensor, meets: set[int], tolerance: float | None = None
    ) -> None:
        for rank, saved in enumerate(results):
            history = _of(saved, dtype, case, "history")
            np.testing.assert_allclose(history, expected[rank].numpy(), rtol=0, atol=tolerance or TOLERANCE[dtype], err_msg=case)
            for step in meets:
                np.testing.assert_array_equal(history[step - 1], _of(results[0], dtype, case, "history")[step - 1])


def _agree(results: list[Arrays], dtype: str, case: str, expected: npt.NDArray[np.generic], tolerance: float | None = None) -> None:
    """Every rank's parameters are the expected ones at every step that it made, and the same on every rank to the bit."""
    for rank in results:
        history = _of(rank, dtype, case, "history")
        np.testing.assert_allclose(history, expected[: len(history)], rtol=0, atol=tolerance or TOLERANCE[dtype], err_msg=case)
        np.testing.assert_array_equal(history, _of(results[0], dtype, case, "history"), err_msg=case)


def _of(rank: Arrays, dtype: str, case: str, name: str) -> npt.NDArray[np.generic]:
    return rank[f"{dtype}/{case}/{name}"]


class OverGloo(TrainingParity):
    """What is there on a CPU only: a GPU has torch's own synchronised batch norm."""

    def test_synchronised_batch_norm_sees_the_joint_batch(self, results: list[Arrays], dtype: str) -> None:
        """With batch statistics over all ranks, a model with batch norm equals one process, too."""
        expected = problem.joint_training(self.ranks, dtype, MOMENTUM, "normed").numpy()
        _agree(results, dtype, NORMED[0].name, expected, tolerance=100 * TOLERANCE[dtype])


class TestTwoRanks(OverGloo):
    """Two trainers over gloo."""

    ranks = 2


@pytest.mark.whole
class TestTwoRanksInSinglePrecision(OverGloo):
    """The same in FP32; mixed precision is tried with every class."""

    ranks = 2
    dtypes = "float32"


@pytest.mark.slow
class TestThreeRanks(OverGloo):
    """Three trainers, which powers of two would hide."""

    ranks = 3
    sampled = True


@pytest.mark.whole
class TestThreeRanksInAllCases(TestThreeRanks):
    """The same without a sample."""

    sampled = False


class FourRanks(TrainingParity):
    """Four trainers, two on each of two nodes."""

    ranks = 4

    def test_averaging_inside_nodes_first_is_the_same_average(self, results: list[Arrays], dtype: str) -> None:
        """Local SGD over a hierarchy averages over all ranks."""
        expected = problem.local_training(self.ranks, dtype, MOMENTUM, Schedule(FOUR))
        self._agree_by_rank(results, dtype, "K = 4, leaders", expected, FOUR)


@pytest.mark.slow
class TestFourRanks(FourRanks, OverGloo):
    """Four trainers over gloo."""

    sampled = True


@pytest.mark.whole
class TestFourRanksInAllCases(TestFourRanks):
    """The same without a sample."""

    sampled = False


def test_hierarchies_train_alike_on_a_deferred_group() -> None:
    """What four ranks have and two have not: collectives of nodes, whose side streams wait for one another."""
    saved = _launch(4, "deferred", "float64", "hierarchies")
    for case in HIERARCHICAL:
        _agree(saved, "float64", case.name, problem.joint_training(4, "float64", MOMENTUM).numpy())
    FourRanks().test_averaging_inside_nodes_first_is_the_same_average(saved, "float64")


class TestTwoRanksOnADeferredGroup(TrainingParity):
    """Two trainers over a group whose waits return at once, as NCCL's do."""

    ranks = 2
    backend = "deferred"
    sampled = True


@pytest.mark.whole
class TestTwoRanksInAllCasesOnADeferredGroup(TestTwoRanksOnADeferredGroup):
    """The same without a sample."""

    sampled = False


@pytest.mark.whole
class TestThreeRanksOnADeferredGroup(TrainingParity):
    """Three trainers over such a group."""

    ranks = 3
    backend = "deferred"


@pytest.mark.whole
class TestFourRanksOnADeferredGroup(FourRanks):
    """Four trainers over such a group, with the hierarchy's side streams."""

    backend = "deferred"
