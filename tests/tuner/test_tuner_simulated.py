"""A tuning by simulation alone, against step times that are worked out by hand.

A ring all-reduce of two trainers takes 2 latencies and its bytes over the bandwidth: 2 alpha + S / B.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetbench.experiment import Experiment, Tune
from fleetbench.measurements import Memory, ModelFlops
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, name_profile
from fleetbench.quantities import Bytes
from fleetbench.result import step_s_of
from fleetbench.strategy import DistributedStrategy
from real.estimate.step import estimate
from sim.many.sweep import Axis
from sim.run import simulate
from tuner.simulated import candidates, sharded
from tuner.simulated.answer import SimulatedRecommendation, tune_simulated
from tuner.simulated.candidates import ranked
from tuner.simulated.sizes import tune_sizes
from tuner.simulated.uncertainty import FIRST_LOOK_ERROR, MODEL_ERROR, spread_of, ways_outside

MIB_NUMBERS = 262_144
"""float32 numbers of 1 MiB."""
ONE_QUEUE = {"nccl_comm_num": [1], "sync_nccl_allreduce": [True]}


def _experiment(**changes: Any) -> Experiment:
    """Four layers of 1 ms forward, 2 ms backward and 1 MiB each, a bucket each, on two nodes 5 ms apart whose bandwidth is no limit."""
    data: dict[str, Any] = {
        "name": "by_hand",
        "workload": {
            "model": "layers",
            "steps": 20,
            "layers": [{"name": "block", "params": MIB_NUMBERS, "forward": "1 ms", "backward": "2 ms", "repeat": 4}],
        },
        "cluster": {"nodes": 2, "inter": {"bandwidth": "10000000 Gbit/s", "latency": "5 ms", "payload": True}},
        "strategy": {"fuse_grad_size_in_MB": 1.0},
        "tune": {"fuse_grad_size_in_MB": [1.0, 2.0, 32.0], **ONE_QUEUE},
    }
    for section, values in changes.items():
        data[section] = {**data[section], **values} if section in data else values
    return Experiment.from_dict(data)


def test_the_best_bucket_is_the_one_worked_out_by_hand(tmp_path: Path) -> None:
    """Each all-reduce takes 10 ms. Four buckets, of which the first begins after 6 ms: 6 + 40. One, after 12 ms: 12 + 10."""
    found, folder = tune_simulated(_experiment(), out=tmp_path)
    assert found.default_s == pytest.approx(0.046, rel=1e-4)
    assert found.step_s == pytest.approx(0.022, rel=1e-4)
    assert found.speedup == pytest.approx(46 / 22, rel=1e-3)
    assert found.samples_per_s == pytest.approx(2 * 32 / 0.022, rel=1e-4)
    assert found.low < found.speedup < found.high
    text = (folder / "recommended.toml").read_text(encoding="utf-8")
    assert text.splitlines()[0].startswith("# SIMULATED, declared compute: use ")
    assert DistributedStrategy.load(folder / "recommended.toml") == found.strategy != _experiment().strategy


def _flipping(**tune: Any) -> Experiment:
    """Two layers of 10 ms backward, 6 ms on the wire each; alpha 3 ms: two buckets 1 + 10 + 2 x 12, one 1 + 20 + 6 + 12."""
    layers = [{"name": "block", "params": MIB_NUMBERS, "forward": "500 us", "backward": "10 ms", "repeat": 2}]
    rate = f"{MIB_NUMBERS * 32 / 6e-3:.0f} bit/s"
    link = {"bandwidth": rate, "latency": "3 ms", "payload": True}
    return _experiment(workload={"layers": layers}, cluster={"inter": link}, strategy={"fuse_grad_size_in_MB": 32.0}, tune=tune)


def test_a_latency_that_flips_the_answer_is_found_with_its_cost(tmp_path: Path) -> None:
    """At twice the latency two buckets take 1 + 10 + 2 x 18 ms and one 1 + 20 + 12 + 12, at half of it 1 + 20 + 9 and 1 + 20 + 15."""
    found, _ = tune_simulated(_flipping(fusion=[], update_by_bucket=[False]), out=tmp_path)
    assert (found.default_s, found.step_s) == pytest.approx((0.039, 0.035), rel=1e-4)
    cases = {case.assumption: case for case in found.cases}
    twice, half = cases["latency x 2"], cases["latency x 0.5"]
    assert twice.changes_answer
    assert twice.best == _flipping().strategy  # one bucket
    assert (twice.recommended_s, twice.best_s) == pytest.approx((0.047, 0.045), rel=1e-4)
    assert twice.cost == pytest.approx(2 / 45, rel=1e-3)
    assert not half.changes_answer
    assert (half.recommended_s, half.default_s) == pytest.approx((0.030, 0.036), rel=1e-4)
    assert {"bandwidth x 0.5", "compute x 2", "jitter of mean 0.1"} < set(cases)


def test_assumptions_scale_what_they_name(tmp_path: Path) -> None:
    """One trainer: 12 ms of compute, X = 0.5 always; nothing to recommend, and no link to doubt."""
    slow = {"kind": "jitter", "distribution": "constant", "mean": 0.5}
    one = _experiment(cluster={"nodes": 1, "stragglers": [slow]})
    found, _ = tune_simulated(one, out=tmp_path)
    assert (found.speedup, found.low, found.high) == (1.0, 1.0, 1.0)
    assert found.strategy == one.strategy
    times = {case.assumption: round(1e3 * case.recommended_s, 3) for case in found.cases}
    changed = {"stragglers x 0.5": 15.0, "stragglers x 2": 24.0, "compute x 0.5": 9.0, "compute x 2": 36.0}
    assert times == {"as declared": 18.0, **changed}
    parts = found.parts
    assert (parts["undelayed_s"], parts["compute_s"], parts["wait_s"], parts["exposed_comm_s"]) == pytest.approx((0.012, 0.018, 0.0, 0.0))


def _delayed(*, seed: int = 0, bandwidth: str = "1 Gbit/s", slowdown: float = 1.3, mean: float = 0.2, steps: int = 20) -> Experiment:
    """Four nodes with jitter, one of them slow, whose links take part of a step that no compute hides: nothing gains by 90 %."""
    return _experiment(
        cluster={
            "nodes": 4,
            "inter": {"bandwidth": bandwidth, "latency": "1 ms", "payload": True},
            "node_overrides": [{"nodes": [0], "slowdown": slowdown}],
            "stragglers": [{"kind": "jitter", "distribution": "lognormal", "mean": mean}],
        },
        tune={"min_gain": 0.9, "fusion": []},
        run={"seed": seed},
        workload={"steps": steps},
    )


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> SimulatedRecommendation:
    """Its answer: keep the experiment's own strategy."""
    return tune_simulated(_delayed(), out=tmp_path_factory.mktemp("runs"))[0]


def _simulated_s(**changes: Any) -> float:
    """By runs under the answer's eight seeds, one by one, of all 20 steps after two of warm-up and one more."""
    runs = [simulate(_delayed(seed=seed, steps=22, **changes), timeline=False) for seed in range(1, 9)]
    return sum(map(step_s_of, runs)) / 8


def test_all_assumptions_have_the_draws_of_the_headline(delayed: SimulatedRecommendation) -> None:
    """Each row is what runs of the changed file say, under the same seeds; so half the bandwidth is never faster, nor less delay slower."""
    rows = {case.assumption: case.recommended_s for case in delayed.cases}
    assert next(iter(rows)) == "as declared"
    assert rows["as declared"] == delayed.step_s == delayed.default_s == pytest.approx(_simulated_s(), rel=1e-12)
    assert rows["bandwidth x 0.5"] == pytest.approx(_simulated_s(bandwidth="500 Mbit/s"), rel=1e-12)
    assert rows["stragglers x 2"] == pytest.approx(_simulated_s(slowdown=1.6, mean=0.4), rel=1e-12)
    for name in ("bandwidth", "latency", "stragglers", "compute"):
        low, high = (rows[f"{name} x {factor}"] for factor in ((2, 0.5) if name == "bandwidth" else (0.5, 2)))
        assert low < rows["as declared"] < high


def test_keeping_gives_the_interval_of_the_best_other(delayed: SimulatedRecommendation) -> None:
    """In its line and beside the first runner-up; around its speed-up, as wide as the seeds and the simulator make it."""
    assert (delayed.speedup, delayed.low, delayed.high) == (1.0, 1.0, 1.0)
    best, *others = delayed.runners_up
    low, high = best.interval
    ratio = delayed.default_s / best.step_s
    assert low < ratio < high
    assert math.log(high / low) == pytest.approx(2 * math.hypot(delayed.spread.seeds, delayed.spread.model))
    assert f"the best other {ratio:.3f}x [{low:.2f}, {high:.2f}]" in delayed.line
    assert not any(other.interval for other in others)


def test_a_size_of_a_sweep_has_the_step_of_the_answer_for_it_alone(delayed: SimulatedRecommendation, tmp_path: Path) -> None:
    """To the last bit."""
    sizes = {size.value: size for size in tune_sizes(_loader(_delayed()), Axis.parse("cluster.nodes=4,8"), out=tmp_path).sizes}
    assert (sizes["4"].step_s, sizes["4"].default_s) == (delayed.step_s, delayed.default_s)


def test_the_spread_over_seeds_covers_another_seed() -> None:
    """Of 1,000 samples of eight normal logarithms 90 % cover a ninth one; the standard error is 0.95 %."""
    draws = np.exp(np.random.default_rng(0).normal(0.3, 0.02, (1_000, 9)))
    covered = 0
    for *ratios, other in draws.tolist():
        spread = spread_of(ratios, ()).seeds
        covered += abs(math.log(other) - sum(map(math.log, ratios)) / 8) <= spread
    assert covered / 1_000 == pytest.approx(0.9, abs=0.03)


def test_each_way_out_of_what_was_measured_widens_the_interval() -> None:
    """Two trainers at 100 Mbit/s on gloo were measured; eight, on GPUs and fast links, were not."""
    link = {"bandwidth": "100 Mbit/s", "latency": "0 s"}
    assert ways_outside(_experiment(cluster={"inter": link})) == ()
    far = _experiment(cluster={"nodes": 8, "inter": {**link, "bandwidth": "1 Gbit/s"}}, run={"device": "cuda"})
    assert len(ways_outside(far)) == 3
    low, high = spread_of([2.0], ways_outside(far)).interval(2.0)
    assert math.log(2 / low) == pytest.approx(math.hypot(MODEL_ERROR, math.sqrt(3) * FIRST_LOOK_ERROR))
    assert math.log(high / 2) == pytest.approx(math.log(2 / low))


def _profile(experiment: Experiment) -> Profile:
    """The layers of ``_experiment``, as a profile of estimated times."""
    layers = tuple(
        Layer(
            name=f"block{index}",
            gradients=(Gradient(name=f"block{index}.weight", numel=MIB_NUMBERS, ready=2_000_000 * (4 - index)),),  # type: ignore[arg-type]
            forward=1_000_000,  # type: ignore[arg-type]
            backward=2_000_000,  # type: ignore[arg-type]
        )
        for index in range(4)
    )
    memory = Memory(parameters=1, gradients=1, optimizer_state=0, activations=1, peak=79 * 10**9)  # type: ignore[arg-type]
    table = LayerTable(key=compute_key(experiment), layers=layers)
    return Profile(machine="none", created="never", tables=(table,), memory=memory, estimated=0.25)


def _registry(folder: Path, gpu: str) -> Experiment:
    """A model of the registry, and a profile of estimated times."""
    workload = {"model": "digits_mlp", "layers": [], "batch_size": 32}
    experiment = _experiment(workload=workload, cluster={"gpu": gpu}, run={"device": "cuda"}, tune={"thread_num": [1]})
    return name_profile(experiment, _profile(experiment), folder / "profile.toml")


def test_what_fits_no_trainer_is_left_out_before_time_is_asked(tmp_path: Path) -> None:
    """79 GB of optimizer state and 8 GB of parameters and gradients fill no GPU of 80 GB: only shards fit, whatever they cost."""
    experiment = _registry(tmp_path, "H100").replace(tune=Tune(thread_num=(1,), sharding=(1, 3), min_gain=0.5))
    large = Memory(
        parameters=Bytes(4 * 10**9),
        gradients=Bytes(4 * 10**9),
        optimizer_state=Bytes(79 * 10**9),
        activations=Bytes(10**9),
        peak=Bytes(88 * 10**9),
    )
    named = name_profile(experiment, dataclasses.replace(_profile(experiment), memory=large), tmp_path / "large.toml")
    found, _ = tune_simulated(named, out=tmp_path)
    assert found.strategy.sharding
    assert found.fits_in_memory
    assert found.memory["optimizer state"] == 79 * 10**9 // 2
    assert found.line.endswith("the experiment's own strategy needs more memory than a trainer has")
    assert all(case.best != named.strategy for case in found.cases)
    assert any("has too little memory for them" in note for note in found.notes)


def test_the_sharded_strategies_that_are_tried() -> None:
    """Over all trainers also spread within a node after a forward; where rounding is allowed each in BF16, too. Each has a time."""
    cluster = {"trainers_per_node": 2, "nics_per_node": 2, "intra": {"bandwidth": "100 Gbit/s", "latency": "5 us"}}

    def tried(**tune: Any) -> list[tuple[int, int, bool | int, bool]]:
        asked = _experiment(cluster=cluster, tune={"sharding": [2, 3], **tune})
        found, notes = sharded.candidates(asked)
        assert not notes
        assert all(step_s_of(simulate(asked.replace(strategy=one))) > 0 for one in found)
        configs = [(one.sharding_configs, one.bf16_allreduce) for one in found]
        return [(one.stage, one.sharding_degree, one.reshard_after_forward, wire) for one, wire in configs]

    own = [(2, 0, True, False), (2, 2, True, False), (3, 0, True, False), (3, 2, True, False), (3, 0, 2, False)]
    assert tried() == own
    assert tried(allow=["wire16"]) == [(*each[:3], wire) for each in own for wire in (False, True)]
    short = _experiment(cluster=cluster, tune={"sharding": [2, 3], "allow": ["wire16"]}).replace(
        strategy=DistributedStrategy(bf16_allreduce=True)
    )
    assert len(set(sharded.candidates(short)[0])) == len(sharded.candidates(short)[0]) == len(own)


def test_estimated_compute_is_said_and_widens_the_interval(tmp_path: Path) -> None:
    """Compute times c: 6 c + 40 ms in four buckets, 12 c + 10 in one; c = 0.75 and 1.25 are the ends."""
    found, folder = tune_simulated(_registry(tmp_path, "H100"), out=tmp_path)
    assert found.compute == "estimated compute (within 25 % in 90 % of cases)"
    assert "SIMULATED, estimated compute" in (folder / "recommended.toml").read_text(encoding="utf-8")
    middle = 46 / 22
    assert found.speedup == pytest.approx(middle, rel=1e-3)
    assert found.spread.estimate_high == pytest.approx(math.log(44.5 / 19 / middle), abs=1e-3)
    assert found.spread.estimate_low == pytest.approx(-math.log(47.5 / 25 / middle), abs=1e-3)
    assert found.fits_in_memory
    assert not tune_simulated(_registry(tmp_path, "A100-40GB"), out=tmp_path)[0].fits_in_memory


def test_sizes_are_priced(tmp_path: Path) -> None:
    """A step takes 12 ms on one trainer and 22 on two: 3.6 an hour make 0.375 and 0.6875 a million samples of 32 a step."""
    priced = _experiment(tune={"price_per_trainer_hour": 3.6})
    found = tune_sizes(_loader(priced), Axis.parse("cluster.nodes=1,2"), out=tmp_path)
    assert [size.step_s for size in found.sizes] == pytest.approx([0.012, 0.022], rel=1e-4)
    assert [size.efficiency for size in found.sizes] == pytest.approx([1.0, 12 / 22], rel=1e-4)
    assert [size.cost for size in found.sizes] == pytest.approx([0.375, 0.6875], rel=1e-4)
    assert [size.default_s for size in found.sizes] == pytest.approx([0.012, 0.046], rel=1e-4)
    assert [size.days for size in found.sizes] == [None, None]
    whole = tune_sizes(
        _loader(_experiment(tune={"samples": 2.304e8, "price_per_trainer_hour": 3.6})), Axis.parse("cluster.nodes=1"), out=tmp_path
    )
    assert whole.sizes[0].days == pytest.approx(1.0, rel=1e-4)
    assert whole.sizes[0].cost == pytest.approx(86.4, rel=1e-4)


def test_reference_points_choose_the_number_of_trainers(tmp_path: Path) -> None:
    """Steps of 12 ms of 32 samples and 22 ms of 64: with as many samples for both two are sooner, and one is cheaper."""
    points = [{"batch_size": batch, "samples": 2.304e8, "runs": 100, "sd": 0.0} for batch in (16, 32, 64, 128)]
    flat = _experiment(tune={"price_per_trainer_hour": 3.6, "reference_points": points})
    found = tune_sizes(_loader(flat), Axis.parse("cluster.nodes=1,2"), out=tmp_path)
    assert [size.days for size in found.sizes] == pytest.approx([1.0, 22 / 24], rel=0.02)
    assert {name: size.trainers for name, size in found.least.items()} == {"soonest": 2, "cheapest": 1}
    assert all(size.days_interval[0] < (size.days or 0) < size.days_interval[1] for size in found.sizes)
    assert tune_sizes(_loader(_experiment()), Axis.parse("cluster.nodes=1"), out=tmp_path).least == {}


def _loader(experiment: Experiment) -> Any:
    import tomllib

    from fleetbench.experiment import apply_override

    def load(more: Any) -> Experiment:
        data = tomllib.loads(experiment.to_toml())
        for override in more:
            apply_override(data, override)
        return Experiment.from_dict(data)

    return load


def test_local_steps_are_searched_only_where_a_target_prices_them(tmp_path: Path) -> None:
    """As in a tuning that measures."""
    plain = ranked(_experiment(), out=tmp_path)
    assert {strategy.local_steps for strategy in plain.step_s} == {1}
    assert any(str(note).startswith("tune.local_steps stays 1") for note in plain.notes)
    curve = {"target_loss": 0.5, "loss_curve": {"start": 2.0, "floor": 0.1, "half_life": "20 steps"}}
    found, _ = tune_simulated(_experiment(workload=curve, tune={"local_steps": [1, 4], "fuse_grad_size_in_MB": [1.0]}), out=tmp_path)
    assert found.strategy.local_steps == 4
    assert found.notes[0].startswith("what 4 local steps cost in loss is not simulated")


@pytest.mark.slow
def test_what_fits_only_recomputed_is_recomputed(tmp_path: Path) -> None:
    """A memory for what two blocks keep and for one of them whole: each is computed again, in its time. A byte less is too little."""
    options = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "positions": 32}
    workload = {"model": "gpt", "model_options": options, "data": "synthetic", "data_options": {"length": 32}, "batch_size": 64}
    plain = Experiment.from_dict({"workload": {**workload, "steps": 5}, "run": {"device": "cuda"}, "tune": {"thread_num": [1]}})
    again = DistributedStrategy(recompute=True, recompute_configs={"checkpoints": ["blocks.0", "blocks.1"]})
    whole, kept = estimate(plain, "A100"), estimate(plain.replace(strategy=again), "A100")
    block = sum(layer.activation_bytes for layer in whole.tables[0].layers if layer.name.startswith("blocks.1."))
    assert whole.memory is not None
    assert kept.memory is not None
    needed = kept.memory.peak + block
    assert needed < whole.memory.peak
    gpu, less = (f"1 TFLOP/s, 1 GB/s, {size / 1e6:.6f} MB" for size in (needed, needed - 1))
    on = {name: plain.replace(cluster=dataclasses.replace(plain.cluster, gpu=name)) for name in (gpu, less)}
    found, _ = tune_simulated(on[gpu], out=tmp_path)
    assert (found.strategy, found.fits_in_memory, found.per_trainer.memory_bytes) == (again, True, needed)
    table = estimate(on[gpu].replace(strategy=again), gpu).tables[0]
    assert found.step_s == pytest.approx((table.forward_ns + table.backward_ns + table.update) / 1e9, rel=1e-3)
    assert sharded.fits(candidates.with_compute(on[less], tmp_path).replace(strategy=again)) is False


def test_answers_have_the_utilisation_of_a_gpu(tmp_path: Path) -> None:
    """FLOPs of a tenth of what the GPU computes in the recommended step are an MFU of 10 %, in an answer, its size and a run of it."""
    plain = _registry(tmp_path, "H100")
    first, _ = tune_simulated(plain, out=tmp_path)
    flops = ModelFlops(per_step=0.1 * first.step_s * 1e15, peak_s=1e15, precision="bf16")
    named = name_profile(plain, dataclasses.replace(_profile(plain), flops=flops), tmp_path / "flops.toml")
    found, folder = tune_simulated(named, out=tmp_path)
    assert found.per_trainer.mfu == pytest.approx(0.1, rel=1e-6)
    assert found.per_trainer.samples_per_s == pytest.approx(found.samples_per_s / 2)
    assert found.per_trainer.memory_bytes == sum(found.memory.values())
    stored = json.loads((folder / "recommendation.json").read_text(encoding="utf-8"))["per_trainer"]
    assert (stored["mfu"], stored["peak_flops_s"]) == (found.per_trainer.mfu, 1e15)
    (size,) = tune_sizes(_loader(named), Axis.parse("cluster.nodes=2"), out=tmp_path).sizes
    assert size.per_trainer == found.per_trainer
    summary = simulate(named.replace(strategy=found.strategy)).summary
    assert summary.per_trainer is not None
    assert summary.per_trainer["mfu"] == pytest.approx(0.1 * first.step_s * summary.steps / summary.wall_s)
    assert summary.per_trainer["memory_bytes"] == found.per_trainer.memory_bytes
