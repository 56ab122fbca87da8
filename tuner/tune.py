"""Tune: profile, search in the simulator, verify with real runs, recommend."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile, table_for
from fleetbench.store import new_run_id, save_run
from fleetbench.workload import LAYERS
from tuner.advice import advice
from tuner.legs import SECONDS_PER_HOUR, SPENT, Legs, Runner
from tuner.pairs import DEFAULT
from tuner.recommendation import Arm, Recommendation
from tuner.search import Search, Simulate, StepS, search, shortened, simulated_step_s
from tuner.space import search_space
from tuner.verify import Progress, Verification, verify

RUNS = "runs"
"""Folder of the stored runs, below a recommendation's."""


def tune(
    experiment: Experiment,
    *,
    out: Path = Path("runs"),
    progress: Progress | None = None,
    runner: Runner | None = None,
    simulate: Simulate | None = None,
    spent_s: Callable[[], float] | None = None,
    draft: Path | None = None,
) -> tuple[Recommendation, Path]:
    """Recommend a strategy for the experiment, and return it with its folder below ``out``.

    The folder holds ``recommended.toml``, ``recommendation.json``, ``experiment.toml`` and ``runs/``.
    ``progress`` is told what is being done, and how much of it. ``runner`` and ``simulate`` stand
    in for a launch of processes and for the simulator. ``spent_s`` says how many seconds of the
    budget, of all trainers together, are gone when real runs begin. Where ``draft`` is given the
    folder is made there, in place of what lies there, and stays: its caller moves it. Raises ``ConfigError`` for what cannot be
    executed and ``WorkerFailed`` for processes that die; a search that was interrupted goes on
    where it stopped when the same experiment is tuned again below the same ``out``.
    """
    if experiment.strategy.mode == "ps":
        hint = "compare runs of `fleetbench sim` or `real` with different a_sync_configs"
        raise ConfigError("strategies of parameter servers are not searched", "strategy.mode", "'ps'", hint)
    simulated_by = simulate or _simulator()
    if runner is None:
        _refuse_unsupported(experiment)
    experiment = _profiled(experiment, out, progress)
    profile = None if experiment.workload.profile is None else Profile.load(experiment.workload.profile)
    space = search_space(experiment, profile)
    advised, left_out = advice(experiment, table_for(experiment, profile), profile)
    told = None if progress is None else lambda done, total: progress("simulated trials", done, total)
    step_s = _objective(experiment, profile) if simulate is None else None
    found = search(experiment, space, advised, out=out, simulate=simulated_by, step_s=step_s, profile=profile, progress=told)

    name = f"{experiment.name}-tune-{experiment.digest()}-{new_run_id()}"
    if draft is not None:
        shutil.rmtree(draft, ignore_errors=True)
    folder = (draft or out) / name
    runs = folder / RUNS
    runs.mkdir(parents=True)
    experiment.save(folder / "experiment.toml")
    arms, notes = _arms(found, experiment.tune.finalists)
    arms = [_simulated(arm, experiment, profile, simulated_by, runs) for arm in arms]
    with _launch(experiment, profile, runner, out) as launched:
        legs = Legs(
            experiment=experiment,
            runner=launched,
            folder=runs,
            step_s=arms[0].simulated_s,
            spent_s=0.0 if spent_s is None else spent_s(),
            on_spent=spending(experiment, progress),
        )
        verification = verify(experiment, arms, legs, progress)
    verification = dataclasses.replace(
        verification,
        arms=tuple(dataclasses.replace(arm, measured_runs=tuple(legs.runs.get(arm.name, ()))) for arm in verification.arms),
        notes=(*_busy(profile), *space.notes, *notes, *verification.notes),
    )
    recommendation = _recommendation(experiment, found, verification, left_out)
    recommendation.save(folder)
    return recommendation, folder


def spending(experiment: Experiment, progress: Progress | None) -> Callable[[float], None]:
    """Shows spent seconds beside the budget; nothing where there is none."""
    hours = experiment.tune.budget_gpu_hours
    if hours is None or progress is None:
        return lambda _: None
    return lambda spent_s: progress(SPENT, round(spent_s), round(hours * SECONDS_PER_HOUR))


def _refuse_unsupported(experiment: Experiment) -> None:
    """What real runs cannot do is refused before the search, not behind it."""
    from real.supported import refuse_unsupported

    refuse_unsupported(experiment, experiment.strategy)


def _simulator() -> Simulate:
    from sim.run import simulate

    return simulate


def _objective(experiment: Experiment, profile: Profile | None) -> StepS:
    from sim.objective import StepTime

    return StepTime(shortened(experiment), profile)


def _busy(profile: Profile | None) -> tuple[str, ...]:
    return () if profile is None or profile.busy is None else (profile.busy,)


def _profiled(experiment: Experiment, out: Path, progress: Progress | None) -> Experiment:
    if experiment.workload.model == LAYERS:
        return experiment
    from real.profile.profiling import ensure_profile

    told = None if progress is None else lambda done, total: progress("profile", done, total)
    return ensure_profile(experiment, out, progress=told)


@contextmanager
def _launch(experiment: Experiment, profile: Profile | None, runner: Runner | None, out: Path) -> Iterator[Runner]:
    if runner is not None:
        yield runner
        return
    from real.session import Session

    with Session(experiment, profile, root=out) as session:
        yield session


def _arms(found: Search, finalists: int) -> tuple[list[Arm], list[str]]:
    """The default, Fleet's advice where it is another strategy, and the best candidates."""
    chosen = [(DEFAULT, found.default)]
    notes = []
    if found.advice is not None and found.advice.key != found.default.key:
        chosen.append(("advice", found.advice))
    elif found.advice is not None:
        notes.append("Fleet's advice comes to the same plan as the default, and is not run beside it")
    chosen += [(f"candidate {number}", tried) for number, tried in enumerate(found.best(finalists), start=1)]
    return [Arm(name=name, strategy=tried.strategy, simulated_s=tried.trial.simulated_s) for name, tried in chosen], notes


def _simulated(arm: Arm, experiment: Experiment, profile: Profile | None, simulate: Simulate, runs: Path) -> Arm:
    """The arm with a stored simulated run of a leg's length, to lay beside its real ones."""
    workload = dataclasses.replace(experiment.workload, steps=experiment.tune.leg_steps)
    stored = save_run(simulate(experiment.replace(strategy=arm.strategy, workload=workload), profile=profile), runs)
    assert stored.path is not None
    return dataclasses.replace(arm, simulated_run=stored.path.name, simulated_s=simulated_step_s(stored))


def _recommendation(experiment: Experiment, found: Search, verification: Verification, left_out: Sequence[str]) -> Recommendation:
    arms = {arm.name: arm for arm in verification.arms}
    used = verification.finalist if verification.verdict == "USE" else None
    speedup = verification.speedup
    runs = [run for arm in verification.arms for run in (arm.simulated_run, *arm.measured_runs) if run is not None]
    return Recommendation(
        experiment=experiment.digest(),
        name=experiment.name,
        verdict=verification.verdict,
        reason=verification.reason,
        strategy=arms[used or DEFAULT].strategy,
        finalist=verification.finalist,
        speedup=None if speedup is None else speedup.mean,
        low=None if speedup is None else speedup.low,
        high=None if speedup is None else speedup.high,
        pairs=verification.pairs,
        arms=verification.arms,
        trials=tuple(tried.trial for tried in found.tried),
        advice_left_out=tuple(left_out),
        notes=verification.notes,
        runs=tuple(runs),
    )
