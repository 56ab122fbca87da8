"""A tuning that goes on from an earlier one's folder: what has moved, what is measured again, and what is not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tuner_fakes import FakeRunner, FakeSimulate, layers_experiment, profiled_experiment

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from tuner.earlier import Earlier, Held
from tuner.recommendation import Arm, Pair, Recommendation
from tuner.resumption import inputs_of
from tuner.tune import tune

FEW: dict[str, object] = {"fusion": (), "update_by_bucket": (False,), "nccl_comm_num": (1,), "sync_nccl_allreduce": (True,)}


def formula(strategy: DistributedStrategy) -> float:
    """Buckets of 2 MB take 9 ms a step, of 1 MB 10, and others 13; K halves it."""
    return {2.0: 0.009, 1.0: 0.010}.get(strategy.fuse_grad_size_in_MB, 0.013) / (1 if strategy.local_steps == 1 else 2)


Tuned = tuple[Recommendation, Path, FakeRunner]


def tuned(experiment: Experiment, out: Path, earlier: Path | None = None) -> Tuned:
    """A tuning by formula, and what it asked for."""
    runner = FakeRunner(experiment, formula)
    return *tune(experiment, out=out, runner=runner, simulate=FakeSimulate(formula), earlier=earlier), runner


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Tuned]:
    """Buckets of 1 and 32 MB."""
    experiment = layers_experiment(**FEW, fuse_grad_size_in_MB=(1.0, 32.0))
    with pytest.MonkeyPatch.context() as patch:  # as in the tests
        patch.setattr("tuner.space.os.cpu_count", lambda: 64)
        return experiment, tuned(experiment, tmp_path_factory.mktemp("first"))


def test_nothing_is_measured_again_where_nothing_has_moved(first: tuple[Experiment, Tuned], tmp_path: Path) -> None:
    """The same verdict from the same pairs, without a leg; the new folder has the runs of the old one."""
    experiment, (before, folder, _) = first
    found, again, runner = tuned(experiment, tmp_path, folder)
    assert (runner.legs, found.line, found.pairs) == ([], before.line, before.pairs)
    assert any(note.startswith(f"since {folder.name} moved: nothing. Taken from it: legs") for note in found.notes)
    assert {run for arm in found.arms for run in arm.measured_runs} <= {path.name for path in (again / "runs").iterdir()}
    third, _, runner = tuned(experiment, tmp_path, again)
    assert (runner.legs, third.line) == ([], before.line)


def test_a_larger_space_measures_what_is_new_beside_the_default(first: tuple[Experiment, Tuned], tmp_path: Path) -> None:
    """Buckets of 2 MB may be tried now: they are the only new strategy, and run against the default alone."""
    experiment, (_, folder, _) = first
    larger = experiment.replace(tune=replace(experiment.tune, fuse_grad_size_in_MB=(1.0, 2.0, 32.0)))
    found, _, runner = tuned(larger, tmp_path, folder)
    assert found.strategy.fuse_grad_size_in_MB == 2.0
    assert {leg.strategy.fuse_grad_size_in_MB for leg in runner.legs} == {2.0, 32.0}
    assert any("moved: tune.fuse_grad_size_in_MB [1.0, 32.0] -> [1.0, 2.0, 32.0]." in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "moved", "held"),
    [
        (lambda data: data["cluster"]["inter"].update(bandwidth="10 Gbit/s"), "cluster.inter.bandwidth", (False, False, False)),
        (lambda data: data["workload"].update(batch_size=9), "workload.batch_size", (False, False, False)),
        (lambda data: data["workload"].update(eval_every=7), "workload.eval_every", (True, False, True)),
        (lambda data: data["tune"].update(pairs=6), "tune.pairs", (True, True, False)),
        (lambda data: data["tune"].update(min_gain=0.03), "tune.min_gain", (True, True, False)),
        (lambda data: data["tune"].update(metric="accuracy"), "tune.metric", (True, False, True)),
        (lambda data: data["tune"].update(leg_steps=6), "tune.leg_steps", (False, False, False)),
        (lambda data: data["run"].update(seed=1), "run.seed", (False, False, False)),
    ],
)
def test_what_has_moved_decides_what_holds(
    first: tuple[Experiment, Tuned], change: Callable[[dict[str, dict[str, dict[str, object]]]], None], moved: str, held: tuple[bool, ...]
) -> None:
    """Of emulated trainers, whose legs follow the links."""
    experiment, (_, folder, _) = first
    data = encode(experiment)
    change(data)
    found = Earlier.load(folder).beside(Experiment.from_dict(data), inputs_of(()))
    assert [line.split()[0] for line in found.moved] == [moved]
    assert (found.legs, found.targets, found.has_pairs) == held


def test_links_of_real_machines_and_layer_times_move_no_legs(tmp_path: Path) -> None:
    """A profile that was taken again has other times, a script other text: legs hold beside the first, and not beside the second."""
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    script = tmp_path / "train.py"
    script.write_text("one")
    _, folder, _ = tuned(experiment, tmp_path / "runs")
    earlier, inputs = Earlier.load(folder), inputs_of(())
    assert earlier.beside(experiment, inputs).moved == ()
    cluster = replace(experiment.cluster, intra=replace(experiment.cluster.intra, bandwidth=10**10))  # type: ignore[type-var]  # declared
    faster = earlier.beside(experiment.replace(cluster=cluster), inputs)
    assert (faster.legs, faster.targets) == (True, True)
    profile = Path(experiment.workload.profile or "")
    profile.write_text("\n".join(profile.read_text().splitlines()[1:]).replace("1 ms", "3 ms"))
    slower = earlier.beside(experiment, inputs)
    assert slower.moved == ("layer times, of a step 30 -> 50 ms",)
    assert slower.legs
    other = earlier.beside(experiment, inputs_of(("python", str(script))))
    assert other.moved[-2:] == ("the command", "the files")
    assert not other.legs


def test_a_script_that_has_not_changed_keeps_its_profile(tmp_path: Path) -> None:
    """Under what is asked for now; another script is found out again, and so is one that may not report its loss."""
    base = Experiment.from_dict({"workload": {"target_loss": 0.5, "steps": 77}, "tune": {"pairs": 9}})
    experiment = profiled_experiment(tmp_path, **FEW, local_steps=(1,), fuse_grad_size_in_MB=(1.0, 32.0), thread_num=(1,), wire=("fp32",))
    experiment = experiment.replace(run=replace(experiment.run, launcher="command"))
    _, folder, _ = tuned(experiment, tmp_path / "runs")
    earlier, inputs = Earlier.load(folder), inputs_of(())
    found = earlier.script(base, inputs)
    assert found is not None
    assert (found.workload.steps, found.tune.pairs, found.workload.model) == (77, 9, experiment.workload.model)
    assert found.workload.profile == str(folder / "profile.toml")
    assert earlier.script(base.replace(workload=replace(base.workload, target_loss=None)), inputs) is None
    assert earlier.script(base, inputs_of(("python",))) is None


def test_a_folder_that_is_no_tuning_is_refused(tmp_path: Path) -> None:
    """Before anything is done."""
    with pytest.raises(ConfigError, match="is no folder of a complete tuning") as caught:
        tuned(layers_experiment(), tmp_path / "runs", tmp_path)
    assert (caught.value.where, caught.value.value) == ("--from", str(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_legs_of_another_pace_are_run_again(tmp_path: Path) -> None:
    """Adaptive K to another target has other rounds in the mean, so the fixed K that its legs ran is not what has its seconds now."""
    strategy = DistributedStrategy(adaptive_localsgd=True)
    eight, two = (DistributedStrategy().replace(localsgd=True, localsgd_configs={"k_steps": k}) for k in (8, 2))
    arm = Arm(name="candidate 1", strategy=strategy, simulated_s=0.01, paced_by=eight, ratio=0.5, measured_s=(0.01,))
    pairs = (Pair(default_s=2.0, finalist_s=1.0, default_first=True),)
    known = Recommendation(
        experiment="0123abcd", name="x", verdict="USE", reason="none", strategy=strategy, arms=(arm,), finalist=arm.name, pairs=pairs
    )
    held = Held(earlier=Earlier(tmp_path, known, layers_experiment(), {}), moved=(), legs=True, targets=True, has_pairs=True)
    assert (held.arm(arm), held.pairs(arm)) == (arm, pairs)
    other = replace(arm, paced_by=two)
    assert (held.arm(other), held.pairs(other)) == (None, ())
