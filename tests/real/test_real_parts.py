"""The parts of the real executor that need no second process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.result import RunResult, StepRecord
from fleetbench.stragglers import ONE
from fleetbench.workload import Workload
from real.buckets import DeltaBucket, FlatBucket
from real.collect import RankPart, collect, first_hit
from real.data import Batches, Sampler, held_out, prepare
from real.injector import Injector
from real.layer_clock import LayerClock
from real.models import MODELS, build_model
from real.profiling import _link
from real.stopwatch import TimedStep


def _sampler(rank: int, *, trainers: int = 3, uneven: str = "cut", num_samples: int = 103) -> Sampler:
    return Sampler(num_samples=num_samples, batch_size=8, trainers=trainers, rank=rank, seed=5, uneven=uneven)


def test_an_epoch_shows_every_sample_at_most_once_and_all_trainers_alike() -> None:
    """103 samples among 3 trainers of 8: 4 steps each, 96 different samples, none twice."""
    samplers = [_sampler(rank) for rank in range(3)]
    assert {sampler.steps_per_epoch for sampler in samplers} == {4}
    seen = np.concatenate([sampler.indices(step) for sampler in samplers for step in range(4)])
    assert len(set(seen.tolist())) == 96


def test_padding_shows_every_sample() -> None:
    """Padded, the last step is filled up: 5 steps, all 103 samples, 17 of them twice."""
    samplers = [_sampler(rank, uneven="pad") for rank in range(3)]
    assert {sampler.steps_per_epoch for sampler in samplers} == {5}
    seen = np.concatenate([sampler.indices(step) for sampler in samplers for step in range(5)])
    assert set(seen.tolist()) == set(range(103))
    assert len(seen) == 120


def test_an_epoch_may_be_shorter_but_not_longer_than_the_data() -> None:
    """``steps_per_epoch`` cuts an epoch short; more steps than the data give are refused with the number they give."""
    short = dataclasses.replace(_sampler(0), wanted_steps=2)
    assert short.steps_per_epoch == 2
    assert not np.array_equal(short.indices(0), short.indices(2))
    with pytest.raises(ConfigError, match=r"steps_per_epoch.*5"):
        _ = dataclasses.replace(_sampler(0), wanted_steps=5).steps_per_epoch


def test_ranks_laid_end_to_end_are_the_joint_batch() -> None:
    """At every step the batches of all ranks are the one of a single process with the joint batch size."""
    joint = Sampler(num_samples=103, batch_size=24, trainers=1, rank=0, seed=5, uneven="cut")
    for position in range(9):
        parts = np.concatenate([_sampler(rank).indices(position) for rank in range(3)])
        np.testing.assert_array_equal(parts, joint.indices(position))


def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    """Training and held-out arrays together are the 1,797 digits, each once, with its label."""
    prepare(Workload(), 0, tmp_path)
    inputs = np.concatenate([np.load(tmp_path / "x_train.npy"), np.load(tmp_path / "x_eval.npy")]).reshape(-1, 64)
    labels = np.concatenate([np.load(tmp_path / "y_train.npy"), np.load(tmp_path / "y_eval.npy")])
    digits, expected = load_digits(return_X_y=True)
    pairs = sorted(zip((inputs * 16).round().astype(int).tolist(), labels.tolist(), strict=True))
    assert pairs == sorted(zip(digits.astype(int).tolist(), expected.tolist(), strict=True))
    assert len(held_out(tmp_path)[1]) == 360
    batch = Batches(tmp_path, _sampler(0, num_samples=1437)).batch(0)
    assert batch[0].shape == (8, 8, 8)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_are_a_function_of_their_seed(name: str) -> None:
    """The same seed gives the same parameters, another seed others, and the global generator is left alone."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (build_model(name, {}, "float64", seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    features = (4, 8, 8) if name.startswith("digits") else (4, 32)
    assert one(torch.zeros(features, dtype=torch.float64)).shape == (4, 10)


def test_unknown_options_are_refused_by_name() -> None:
    """A misspelt option and a wrong value are errors with the option's name."""
    for options in ({"hiden": 3}, {"hidden": 0}, {"hidden": 2.5}):
        with pytest.raises(ConfigError, match="hid"):
            build_model("digits_mlp", options, "float32", 0)


def test_bucket_views_cover_the_buffer() -> None:
    """Packed gradients lie end to end; exposed, ``.grad`` is the buffer."""
    parameters = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    parameters[0].grad, parameters[1].grad = torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0)
    bucket = FlatBucket(Bucket(id=0, gradients=("a", "b"), numel=10, dtype="float32"), parameters)
    bucket.pack_gradients()
    assert torch.equal(bucket.buffer, torch.arange(10.0))
    bucket.buffer.mul_(2)
    bucket.expose_gradients()
    assert parameters[1].grad is not None
    assert torch.equal(parameters[1].grad, 2 * torch.arange(6.0, 10.0))


def test_delta_bucket_moves_to_snapshot_plus_delta() -> None:
    """P = snapshot + mean(p - snapshot): with a halved delta the parameter goes half the way, and starts there again."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    bucket = DeltaBucket(Bucket(id=0, gradients=("a",), numel=2, dtype="float32"), [parameter], [parameter.detach()])
    with torch.no_grad():
        parameter.add_(torch.tensor([4.0, -2.0]))
    bucket.pack_delta()
    assert bucket.buffer.tolist() == [4.0, -2.0]
    bucket.buffer.div_(2)
    bucket.merge_delta()
    assert parameter.tolist() == [3.0, 1.0]
    bucket.pack_delta()
    assert bucket.buffer.tolist() == [0.0, 0.0]


def _table() -> LayerTable:
    def layer(name: str, ready: int) -> Layer:
        return Layer(name=name, gradients=(Gradient(name=f"{name}.weight", numel=1, ready=ready),), forward=10**6, backward=2 * 10**6)  # type: ignore[arg-type]  # nanoseconds

    return LayerTable(key="test", layers=(layer("0", 4 * 10**6), layer("1", 2 * 10**6)))


def test_injected_sleep_aims_at_totals_and_lateness_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With X = 2 every layer's sleep is twice its time; a sleep that overshoots by 0.3 ms shortens the next."""
    clock = [0]
    monkeypatch.setattr("real.injector.time.monotonic_ns", lambda: clock[0])
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock[0] += round(seconds * 1e9) + 300_000

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    injector = Injector(_table(), sleep)
    injector.attach(model)
    injector.begin(2 * ONE)
    model(torch.zeros(1, 2)).sum().backward()
    injector.finish()
    injector.detach()
    np.testing.assert_allclose(sleeps, [2e-3, 2e-3 - 3e-4, 4e-3 - 3e-4, 4e-3 - 3e-4], rtol=1e-9)
    assert clock[0] == pytest.approx(2 * 6 * 10**6 + 300_000)
    injector.begin(2 * ONE)
    model(torch.zeros(1, 2)).sum().backward()
    assert len(sleeps) == 4


def test_layer_clock_sees_where_the_time_goes() -> None:
    """A layer that sleeps 5 ms in its forward and 10 ms in its backward shows up there, and only there."""
    import time

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's signature
            time.sleep(0.005)
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004  # autograd's signature
            time.sleep(0.010)
            return gradient

    class SlowLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Slow.apply(super().forward(x)))

    model = nn.Sequential(nn.Linear(4, 4), SlowLinear(4, 4), nn.Linear(4, 4))
    clock = LayerClock(model)
    clock.attach()
    for _ in range(3):
        begin = time.monotonic_ns()
        time.sleep(0.003)
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.004)
        clock.end_step(step_ns=time.monotonic_ns() - begin, update_ns=1_000_000)
    clock.detach()
    forward = np.median(clock.times.forward, axis=0) * 1e-6
    ready = dict(zip([name for name, _, _ in clock.times.gradients], np.median(clock.times.ready, axis=0) * 1e-6, strict=True))
    assert 6 <= np.median(clock.times.read) * 1e-6 < 9  # 3 ms before, 4 ms behind, less 1 ms of update
    assert 5 <= forward[1] < 9
    assert forward[0] < 2
    assert forward[2] < 2
    assert ready["2.weight"] < 5
    assert 10 <= ready["1.weight"] < 20


def test_two_totals_over_the_same_bytes_give_the_link() -> None:
    """T = n a + b S by hand: one bucket takes 10 ms, four take 13 ms, so a = 1 ms and 8 MB take 9 ms among two trainers."""
    one, every = (_averaging(seconds, count) for seconds, count in ((0.010, 1), (0.013, 4)))
    link = _link(one, every, 2)
    assert link.latency == 500_000  # 2 (P - 1) = 2 messages a collective
    assert link.bandwidth == round(8e6 * 8 / 0.009)  # 2 (P - 1) / P = 1 times the bytes


def _averaging(stall_s: float, num_buckets: int) -> RunResult:
    """A result with nothing in it but its stall and its buckets of 8 MB together."""
    numel = 2_000_000 // num_buckets
    buckets = tuple(Bucket(id=index, gradients=(f"g{index}",), numel=numel, dtype="float32") for index in range(num_buckets))
    steps = pd.DataFrame({"step": [0, 1, 2, 3], "exposed_comm_s": [9.0, stall_s, stall_s, stall_s]})
    plan = Plan(trainers=2, buckets=buckets, exchange=(), groups=())
    return RunResult(experiment=Experiment(), summary=None, steps=steps, plan=plan)  # type: ignore[arg-type]  # the fit reads no summary


def test_pauses_stop_rank_0s_clock() -> None:
    """Rank 0 pauses 50 ns behind step 1: step 2 starts 50 ns earlier on its clock, on every rank, and the target's time leaves it out."""

    def step(rank: int, number: int, start: int, end: int, paused: int) -> TimedStep:
        record = StepRecord(
            rank=rank, step=number, start_ns=start, forward_ns=10, backward_ns=20, stall_ns=0, update_ns=0,
            end_ns=end, arrival_ns=None, local_steps=1, loss=1.0, bytes_sent=0,
        )  # fmt: skip
        return TimedStep(record, paused)

    held_out = tuple((number, 0.0) for number in (2, 3, 4))
    ranks = []
    for rank in range(2):
        starts = [1000, 1150, 1250, 1350, 1450]
        steps = [step(rank, number, starts[number - 1], starts[number], 50 if number == 1 else 0) for number in (1, 2, 3, 4)]
        ranks.append(RankPart(tuple(steps), (), held_out))
    collected = collect(ranks, 0.5)
    assert [(record.start_ns, record.end_ns) for record in collected.records if record.rank == 1] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
    ]
    assert collected.time_to_target_s == pytest.approx(200e-9)


@pytest.mark.parametrize(("hits", "index"), [("0111", 1), ("1101", None), ("110111", 3), ("11", None), ("", None), ("111", 0)])
def test_three_hits_in_a_row_count_from_the_first(hits: str, index: int | None) -> None:
    """Two hits and a miss are none."""
    assert first_hit([hit == "1" for hit in hits]) == index
