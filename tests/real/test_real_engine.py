"""The engine alone: its other trainers are a fake that answers every collective in this process."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import time

import pytest
import torch
from torch import nn
from zero_trainer import ZeroTrainer, engine_of, six_layers, train

from fleetbench.errors import ConfigError
from fleetbench.plan.events import BucketReady
from fleetbench.plan.training import family
from fleetbench.strategy import DistributedStrategy
from real.engine.engine import Engine


def _overlaps(flights: list[tuple[int, float, float]]) -> int:
    ordered = sorted(flights, key=lambda flight: flight[1])
    return sum(later[1] < earlier[2] for earlier, later in itertools.pairwise(ordered))


def _most_at_once(flights: list[tuple[int, float, float]]) -> int:
    return max(sum(begin <= moment < end for _, begin, end in flights) for _, moment, _ in flights)


@pytest.mark.parametrize("communicators", [1, 2])
def test_one_bucket_is_in_flight_when_the_strategy_says_so(others: ZeroTrainer, communicators: int) -> None:
    """With ``sync_nccl_allreduce`` no two collectives overlap, on however many communicators."""
    engine, optimizer = engine_of(six_layers(), others, fuse_all_reduce_ops=False, nccl_comm_num=communicators)
    train(engine, optimizer, 3)
    assert len(others.flights) == 3 * 12
    assert {flight[0] for flight in others.flights} == set(range(communicators))
    assert _overlaps(others.flights) == 0
    engine.close()


@pytest.mark.parametrize("communicators", [1, 2])
def test_communicators_carry_what_they_can_without_it(others: ZeroTrainer, communicators: int) -> None:
    """Without it two collectives overlap on each communicator, and never three."""
    engine, optimizer = engine_of(six_layers(), others, fuse_all_reduce_ops=False, nccl_comm_num=communicators, sync_nccl_allreduce=False)
    train(engine, optimizer, 3)
    assert _most_at_once(others.flights) == 2 * communicators
    for communicator in range(communicators):
        assert _most_at_once([flight for flight in others.flights if flight[0] == communicator]) == 2
    engine.close()


@pytest.mark.alone
def test_spans_are_those_of_the_collectives(others: ZeroTrainer) -> None:
    """Of twelve handed over together each span lies around its 5 ms and begins when a place is free, and no third is under way."""
    engine, optimizer = engine_of(six_layers(), others, fuse_all_reduce_ops=False, sync_nccl_allreduce=False)
    train(engine, optimizer, 1)
    engine.stopwatch.finish()
    spans = sorted((span.start_ns, span.end_ns) for span in engine.stopwatch.spans if span.communicator is not None)
    carried = sorted((round(begin * 1e9), round(end * 1e9)) for _, begin, end in others.flights)
    assert len(spans) == len(carried) == 12
    ends = sorted(end_ns for _, end_ns in spans)
    for (start_ns, _), (begin_ns, _) in zip(spans, carried, strict=True):
        assert start_ns <= begin_ns
    assert all(over_ns <= end_ns for (_, over_ns), end_ns in zip(sorted(carried, key=lambda flight: flight[1]), ends, strict=True))
    assert all(start_ns >= free_ns for (start_ns, _), free_ns in zip(spans[2:], ends[:-2], strict=True))
    assert _most_at_once([(0, start_ns, end_ns) for start_ns, end_ns in spans]) == 2
    engine.close()


def test_gradients_are_there_when_backward_returns(others: ZeroTrainer) -> None:
    """Every ``.grad`` is half of this trainer's own, although each collective takes longer than the backward."""
    model = six_layers()
    model(torch.ones(2, 8)).sum().backward()
    alone = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    engine, _ = engine_of(model, others, fuse_all_reduce_ops=False, nccl_comm_num=2, sync_nccl_allreduce=False)
    model(torch.ones(2, 8)).sum().backward()
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2)
    engine.close()


def test_the_plan_follows_the_observed_order(others: ZeroTrainer) -> None:
    """Layers registered in another order than they run: after the first step buckets follow readiness."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.third, self.first = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]  # a module's call is untyped

    engine, optimizer = engine_of(Crossed(), others, fuse_grad_size_in_MB=1e-6)
    assert [bucket.gradients[0].split(".")[0] for bucket in engine.plan.buckets] == ["first", "third", "second"]
    train(engine, optimizer, 1)
    assert [bucket.gradients[0].split(".")[0] for bucket in engine.plan.buckets] == ["third", "second", "first"]
    engine.close()


def test_evaluation_between_steps_is_no_step(others: ZeroTrainer) -> None:
    """Forwards without gradients, or in evaluation mode, count no step and exchange nothing."""
    model = six_layers()
    engine, optimizer = engine_of(model, others)
    train(engine, optimizer, 2)
    count = len(others.flights)
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.eval()
    model(torch.ones(2, 8))
    model.train()
    assert (engine.step, len(others.flights)) == (2, count)
    train(engine, optimizer, 1)
    assert engine.step == 3
    engine.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_zeroing_gradients_work(others: ZeroTrainer, set_to_none: bool) -> None:
    """Gradients that stay as zeroed views of the bucket give the same steps as gradients that are dropped."""
    torch.manual_seed(0)
    model = six_layers()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    engine, optimizer = engine_of(model, others)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    engine.close()
    reference = six_layers()
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


def test_gradients_from_before_do_not_make_a_bucket_ready(others: ZeroTrainer) -> None:
    """Layers run the other way round while gradients wait in ``.grad``: what was the last gradient comes first, and is not the end."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.turned = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.turned else self.layers:
                x = layer(x)
            return x

    model, final_ns = Turning(), [0]
    for parameter in model.parameters():  # before the engine's hooks
        parameter.register_post_accumulate_grad_hook(lambda _: final_ns.append(time.monotonic_ns()))
    engine = Engine(model, DistributedStrategy(), others, record=True)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    train(engine, optimizer, 2)
    model.turned = True
    with engine.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model(torch.ones(2, 8)).sum().backward()
    for parameter, first in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, first)  # twice the same, and halved
    (recording,) = engine.recordings()
    assert recording is not None
    ready_ns = [now_ns for now_ns, event, _ in recording.log if isinstance(event, BucketReady)]
    assert ready_ns[-1] >= final_ns[-1]
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 2}}])
def test_a_second_backward_leaves_a_recording_that_replays(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """The strategy is taken back to the step's begin: a fresh one, told what the log holds, decides the same, and counts the step once."""
    strategy = DistributedStrategy.from_dict(fields)
    engine = Engine(six_layers(), strategy, others, record=True)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    for backwards in (1, 3, 2, 1):
        for _ in range(backwards):
            engine.model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (recording,) = engine.recordings()
    assert recording is not None
    assert recording.replayed(family(strategy, engine.plan)) == [operations for *_, operations in recording.log]
    assert engine.num_updates == engine.step == 4
    engine.close()


def test_a_parameter_that_the_loss_does_not_reach_is_named(others: ZeroTrainer) -> None:
    """A step with an unused layer is an error with its parameters' names, raised by ``backward()``."""

    class HalfIdle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]  # a module's call is untyped

    model = HalfIdle()
    engine, _ = engine_of(model, others)
    with pytest.raises(ConfigError, match=r"idle\.bias, idle\.weight"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()


def test_frozen_parameters_start_from_rank_0s_too() -> None:
    """What a frozen layer computes must be the same on every rank, although nothing of it is exchanged later."""
    sent: list[torch.Tensor] = []
    fake = ZeroTrainer()
    fake.broadcast = sent.append  # type: ignore[method-assign]
    model = six_layers()
    model[0].requires_grad_(False)  # torch's signature
    engine_of(model, fake)
    for parameter in model.parameters():
        assert any(tensor.data_ptr() == parameter.data_ptr() for tensor in sent)
    fake.close()


def test_a_users_own_training_remembers_nothing(others: ZeroTrainer) -> None:
    """Without ``keep_times`` no record and no span is kept, however long the training."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy(), others, keep_times=False)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    train(engine, optimizer, 5)
    assert len(others.flights) == 5
    assert engine.stopwatch.steps == []
    assert engine.stopwatch.spans == []
    engine.close()


def test_a_closed_engine_leaves_the_model_as_it_was(others: ZeroTrainer) -> None:
    """No hook stays: the same model trains alone again, and nothing is exchanged."""
    model = six_layers()
    engine, optimizer = engine_of(model, others)
    train(engine, optimizer, 1)
    engine.close()
    count = len(others.flights)
    train(engine, optimizer, 1)
    assert len(others.flights) == count
    assert engine.step == 1


def test_a_failing_collective_is_raised_by_backward(others: ZeroTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on a lane is not lost: ``backward()`` raises it."""

    def fail(*_: object) -> None:
        raise RuntimeError("connection closed by peer")

    model = six_layers()
    engine, _ = engine_of(model, others)
    monkeypatch.setattr(others, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()


def _problem() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return six_layers(), torch.randn(4, 8)


def _merging(k_steps: int, **configs: object) -> dict[str, object]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **configs}}


def test_a_flushed_remainder_is_applied_once(others: ZeroTrainer) -> None:
    """Two of three micro-batches, then the epoch ends: their halved mean is one update, and the next epoch starts again."""
    model, inputs = _problem()
    reference = [parameter.detach().clone() for parameter in model.parameters()]
    engine = Engine(model, DistributedStrategy.from_dict(_merging(3, remainder="flush")), others)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    twin = six_layers()
    with torch.no_grad():
        for parameter, value in zip(twin.parameters(), reference, strict=True):
            parameter.copy_(value)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for num_steps in (2, 3):
        for step in range(num_steps):
            model(inputs * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (twin(inputs * (step + 1)).square().mean() / num_steps / 2).backward()  # the other trainer adds nothing to the mean
        engine.end_epoch()
        plain.step()
        plain.zero_grad()
        for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)
    engine.close()


def test_a_dropped_remainder_leaves_no_trace(others: ZeroTrainer) -> None:
    """What an epoch's end drops is in no later update."""
    model, inputs = _problem()
    engine = Engine(model, DistributedStrategy.from_dict(_merging(2, remainder="drop")), others)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(1000 * inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.end_epoch()
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = six_layers()
    with torch.no_grad():
        for parameter, value in zip(twin.parameters(), before, strict=True):
            parameter.copy_(value)
    twin(inputs).square().mean().backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(parameter.detach(), other.detach() - 0.05 * other.grad)
    engine.close()


def test_merged_steps_may_reach_different_parameters(others: ZeroTrainer) -> None:
    """A branch that only the first of two micro-batches reaches is updated; one that none reaches is not, decay or no decay."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
            self.turn = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            return self.branches[(self.turn - 1) % 2](x)  # type: ignore[no-any-return]  # a module's call is untyped

    model = Branches()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fields = {**_merging(2), "find_unused_parameters": True, "fuse_all_reduce_ops": False}
    engine = Engine(model, DistributedStrategy.from_dict(fields), others)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    engine.attach_optimizer(optimizer)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True)]
    assert moved == [True] * 4 + [False] * 2
    engine.close()


def test_a_small_wire_divides_before_it_casts(others: ZeroTrainer) -> None:
    """A gradient of 100,000, too large for FP16, is half of it after an average with another trainer's zeros."""
    model = nn.Linear(1, 1, bias=False)
    engine, _ = engine_of(model, others, fp16_allreduce=True)
    model(torch.full((1, 1), 100_000.0)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(50_000, rel=2**-11)
    engine.close()


def test_held_statistics_and_recompute_go_together(others: ZeroTrainer) -> None:
    """Statistics that move once an update, in a recomputed block: the gradient of plain training, and two moves in four steps."""
    torch.manual_seed(2)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    model = nn.Sequential(block, nn.Linear(8, 1))
    inputs = torch.randn(4, 8)
    twin = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    twin(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in twin.parameters() if parameter.grad is not None]
    fields = {**_merging(2, batch_norm_per="update"), "recompute": True, "recompute_configs": {"checkpoints": ["0"]}}
    engine = Engine(model, DistributedStrategy.from_dict(fields), others)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.attach_optimizer(optimizer)
    for step in range(1, 5):
        model(inputs).sum().backward()
        if step == 1:
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
        optimizer.step()
        optimizer.zero_grad()
    norm = block[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 2
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 4}}])
@pytest.mark.parametrize("kind", ["dataclass", "object"])
def test_outputs_may_be_of_any_kind(others: ZeroTrainer, fields: dict[str, object], kind: str) -> None:
    """A model may return a dataclass, or an object that hides its tensor: steps begin and end all the same."""

    @dataclasses.dataclass
    class Output:
        scores: torch.Tensor

    class Hidden:
        def __init__(self, scores: torch.Tensor) -> None:
            self.scores = scores

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = six_layers()

        def forward(self, x: torch.Tensor) -> Output | Hidden:
            return Output(self.inner(x)) if kind == "dataclass" else Hidden(self.inner(x))

    model = Wrapped()
    engine, optimizer = engine_of(model, others, **fields)
    for _ in range(6):
        model(torch.ones(2, 8)).scores.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.step == 6
    engine.close()


def test_a_distributed_model_can_be_saved_whole(others: ZeroTrainer) -> None:
    """A copy is the plain model, and what is saved names nothing of the engine."""
    model = six_layers()
    engine, optimizer = engine_of(model, others)
    train(engine, optimizer, 2)
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"ZeroTrainer" not in buffer.getvalue()
    flights = len(others.flights)
    twin(torch.ones(2, 8)).sum().backward()
    assert len(others.flights) == flights
    assert engine.step == 2
    engine.close()


def test_a_subclass_of_an_optimizer_steps_once(others: ZeroTrainer) -> None:
    """A step that calls its base's step runs torch's hooks twice, and is one update all the same, also where it must do nothing."""

    class Own(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure here
            super().step(closure)

    model, inputs = _problem()
    torch.optim.SGD(six_layers().parameters(), lr=0.1)  # from the first instance on, torch runs hooks in SGD.step itself
    engine = Engine(model, DistributedStrategy.from_dict(_merging(2)), others)  # type: ignore[arg-type]  # see _engine
    optimizer = Own(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moved = []
    for _ in range(4):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(next(model.parameters()), before[0]))
        before = [parameter.detach().clone() for parameter in model.parameters()]
    assert moved == [False, True, False, True]
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"sync_nccl_allreduce": False}, {"nccl_comm_num": 2, "sync_nccl_allreduce": False}])
def test_a_plain_bucket_costs_its_all_reduce_alone(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """The strategy hears of all buckets when the last has set out, in the plan's order, and the recording replays."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy(fuse_all_reduce_ops=False, **fields), others, record=True)  # type: ignore[arg-type]  # see _engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    train(engine, optimizer, 1)  # by the plan of before
    heard: list[tuple[int, int]] = []

    def note() -> None:
        told = [event for _, event, _ in engine._decider.log or () if isinstance(event, BucketReady)]
        heard.append((len(told), len(engine.executor._plain)))

    engine.on_compute_end = note
    train(engine, optimizer, 3)
    assert heard == [(12 * before, 12) for before in range(3)]
    (recording,) = engine.recordings()
    assert [event.bucket for _, event, _ in recording.log if isinstance(event, BucketReady)] == 3 * [*range(12)]
    assert recording.replayed(family(engine.strategy, engine.plan)) == [operations for *_, operations in recording.log]
    engine.stopwatch.finish()
    assert [step.record.bytes_sent for step in engine.stopwatch.steps] == 4 * [6 * (8 * 8 + 8) * 4]  # a half there, a half back
    engine.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"build_strategy": {"enable_sequential_execution": True}},
        {"build_strategy": {"enable_backward_optimizer_op_deps": False}},
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"localsgd": True},
        {"find_unused_parameters": True},
        {"bf16_allreduce": True},
        {"nccl_comm_num": 2},
    ],
)
def test_what_is_more_than_an_all_reduce_is_told_bucket_by_bucket(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """A bucket that is cast, merged, updated, looked through, waited for or ordered after another communicator's is no plain one."""
    engine, _ = engine_of(six_layers(), others, fuse_all_reduce_ops=False, **fields)
    assert not engine.executor.is_plain
    engine.close()
