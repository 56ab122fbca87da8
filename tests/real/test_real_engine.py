"""The engine alone: its other trainers are a fake that answers every collective in this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.engine import Engine
from real.lanes import Lane, ThreadLane


class ZeroTrainer:
    """Stands in for ``Communicators``: one other trainer, whose tensors are all zeros.

    An average halves; ``flights`` keeps ``(communicator, start, end)`` of every collective.
    """

    trainers = 2
    rank = 0

    def __init__(self, delay_s: float = 0.0) -> None:
        self.flights: list[tuple[int, float, float]] = []
        self.answers: dict[int, torch.Tensor] = {}
        self._delay_s = delay_s
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()

    def require(self, number: int, groups: object = None) -> None:  # noqa: ARG002  # there is only one other trainer to meet
        """See ``Communicators``."""
        while len(self._lanes) < number:
            self._lanes.append(ThreadLane(f"lane-{len(self._lanes)}"))

    def lane(self, communicator: int) -> Lane:
        """See ``Communicators``."""
        return self._lanes[communicator]

    def prove(self, number: int) -> None:
        """See ``Communicators``."""

    def order_lanes(self) -> None:
        """See ``Communicators``."""

    def part(self, group: str) -> tuple[int, ...]:  # noqa: ARG002  # see require
        """See ``Communicators``."""
        return (0, 1)

    def all_reduce(self, tensor: torch.Tensor, operator: str, group: str, communicator: int) -> None:  # noqa: ARG002  # see require
        """Halve a mean: the other trainer adds nothing."""
        begin = time.monotonic()
        time.sleep(self._delay_s)
        if operator == "mean":
            tensor.div_(2)
        with self._lock:
            self.flights.append((communicator, begin, time.monotonic()))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0 is this one: nothing changes."""

    def close(self) -> None:
        """See ``Communicators``."""
        for lane in self._lanes:
            lane.close()


class Stranger(ZeroTrainer):
    """This process is rank 1, and rank 0 broadcasts zeros: another plan than ours."""

    rank = 1

    def broadcast(self, tensor: torch.Tensor) -> None:
        """What rank 0 sends: zeros."""
        tensor.zero_()


@pytest.fixture
def others() -> Iterator[ZeroTrainer]:
    """Another trainer that takes 5 ms for a collective."""
    fake = ZeroTrainer(0.005)
    yield fake
    fake.close()


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def _engine(model: nn.Module, others: ZeroTrainer, **fields: object) -> tuple[Engine, torch.optim.Optimizer]:
    engine = Engine(model, DistributedStrategy(**fields), others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    return engine, optimizer


def _overlaps(flights: list[tuple[int, float, float]]) -> int:
    ordered = sorted(flights, key=lambda flight: flight[1])
    return sum(later[1] < earlier[2] for earlier, later in itertools.pairwise(ordered))


def _train(engine: Engine, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        engine.model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("communicators", [1, 2])
def test_one_bucket_is_in_flight_when_the_strategy_says_so(others: ZeroTrainer, communicators: int) -> None:
    """With ``sync_nccl_allreduce`` no two collectives overlap, on however many communicators."""
    engine, optimizer = _engine(_model(), others, fuse_all_reduce_ops=False, nccl_comm_num=communicators)
    _train(engine, optimizer, 3)
    assert len(others.flights) == 3 * 12
    assert {flight[0] for flight in others.flights} == set(range(communicators))
    assert _overlaps(others.flights) == 0
    engine.close()


def test_two_communicators_run_free_without_it(others: ZeroTrainer) -> None:
    """Without it two collectives overlap, and still no two on one communicator."""
    engine, optimizer = _engine(_model(), others, fuse_all_reduce_ops=False, nccl_comm_num=2, sync_nccl_allreduce=False)
    _train(engine, optimizer, 3)
    assert _overlaps(others.flights) > 6
    for communicator in range(2):
        assert _overlaps([flight for flight in others.flights if flight[0] == communicator]) == 0
    engine.close()


def test_gradients_are_there_when_backward_returns(others: ZeroTrainer) -> None:
    """Every ``.grad`` is half of this trainer's own, although each collective takes longer than the backward."""
    model = _model()
    model(torch.ones(2, 8)).sum().backward()
    alone = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    engine, _ = _engine(model, others, fuse_all_reduce_ops=False, nccl_comm_num=2, sync_nccl_allreduce=False)
    model(torch.ones(2, 8)).sum().backward()
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2)
    engine.close()


def test_the_plan_follows_the_observed_order(others: ZeroTrainer) -> None:
    """Layers registered in another order than they run: behind the first step buckets follow readiness."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.third, self.first = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]  # a module's call is untyped

    engine, optimizer = _engine(Crossed(), others, fuse_grad_size_in_MB=1e-6)
    assert [bucket.gradients[0].split(".")[0] for bucket in engine.plan.buckets] == ["first", "third", "second"]
    _train(engine, optimizer, 1)
    assert [bucket.gradients[0].split(".")[0] for bucket in engine.plan.buckets] == ["third", "second", "first"]
    engine.close()


def test_evaluation_between_steps_is_no_step(others: ZeroTrainer) -> None:
    """Forwards without gradients, or in evaluation mode, count no step and exchange nothing."""
    model = _model()
    engine, optimizer = _engine(model, others)
    _train(engine, optimizer, 2)
    count = len(others.flights)
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.eval()
    model(torch.ones(2, 8))
    model.train()
    assert (engine.step, len(others.flights)) == (2, count)
    _train(engine, optimizer, 1)
    assert engine.step == 3
    engine.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_zeroing_gradients_work(others: ZeroTrainer, set_to_none: bool) -> None:
    """Gradients that stay as zeroed views of the bucket give the same steps as gradients that are dropped."""
    torch.manual_seed(0)
    model = _model()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    engine, optimizer = _engine(model, others)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    engine.close()
    reference = _model()
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), start, strict=True):
            parameter.copy_(value)
    halved = torch.optim.SGD(reference.parameters(), lr=0.05)
    for _ in range(3):
        reference(torch.ones(2, 8)).sum().backward()
        halved.step()
        halved.zero_grad()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_a_parameter_that_the_loss_does_not_reach_is_named(others: ZeroTrainer) -> None:
    """A step with an unused layer is an error with its parameters' names, raised by ``backward()``."""

    class HalfIdle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]  # a module's call is untyped

    model = HalfIdle()
    engine, _ = _engine(model, others)
    with pytest.raises(ConfigError, match=r"idle\.bias, idle\.weight"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()


def test_two_backwards_before_an_update_are_refused(others: ZeroTrainer) -> None:
    """Accumulating by hand is refused at the second backward, with the way to do it."""
    model = _model()
    engine, _ = _engine(model, others)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match="twice"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()


def test_a_sparse_gradient_from_elsewhere_is_refused_by_name(others: ZeroTrainer) -> None:
    """A sparse gradient of something that is no embedding is named instead of being summed wrongly."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(rows, self.table, sparse=True)

    model = Looked()
    engine, _ = _engine(model, others)
    with pytest.raises(ConfigError, match="parameter table: has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()
    engine.close()


def test_a_rank_with_another_model_is_refused() -> None:
    """A plan that is not rank 0's would mix up tensors: the rank says so before the first exchange."""
    stranger = Stranger()
    with pytest.raises(ConfigError, match="rank 1: plans another exchange than rank 0"):
        _engine(_model(), stranger)
    assert not stranger.flights
    stranger.close()


def test_frozen_parameters_start_from_rank_0s_too() -> None:
    """What a frozen layer computes must be the same on every rank, although nothing of it is exchanged later."""
    sent: list[torch.Tensor] = []
    fake = ZeroTrainer()
    fake.broadcast = sent.append  # type: ignore[method-assign]
    model = _model()
    model[0].requires_grad_(False)  # torch's signature
    _engine(model, fake)
    for parameter in model.parameters():
        assert any(tensor.data_ptr() == parameter.data_ptr() for tensor in sent)
    fake.close()


def test_a_users_own_training_remembers_nothing(others: ZeroTrainer) -> None:
    """Without ``keep_times`` no record and no span is kept, however long the training."""
    model = _model()
    engine = Engine(model, DistributedStrategy(), others, keep_times=False)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    _train(engine, optimizer, 5)
    assert len(others.flights) == 5
    assert engine.stopwatch.steps == []
    assert engine.stopwatch.spans == []
    engine.close()


def test_a_closed_engine_leaves_the_model_as_it_was(others: ZeroTrainer) -> None:
    """No hook stays: the same model trains alone again, and nothing is exchanged."""
    model = _model()
    engine, optimizer = _engine(model, others)
    _train(engine, optimizer, 1)
    engine.close()
    count = len(others.flights)
    _train(engine, optimizer, 1)
    assert len(others.flights) == count
    assert engine.step == 1


def test_a_failing_collective_is_raised_by_backward(others: ZeroTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on a lane is not lost: ``backward()`` raises it."""

    def fail(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    model = _model()
    engine, _ = _engine(model, others)
    monkeypatch.setattr(others, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()
