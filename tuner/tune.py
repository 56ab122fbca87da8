"""Tune: profile, search in the simulator, verify with real runs, recommend."""

import dataclasses
import math
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from fleetbench.advice import LOCAL_SGD, MIXED_PRECISION, OP_FUSION, Advice, advice
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.rounds import in_leg
from fleetbench.profile import profile_of, table_for
from fleetbench.quantities import counted
from fleetbench.recommended import folder_of, keep, key_of_profiled
from fleetbench.result import RunResult, step_s_of
from fleetbench.store import new_run_id, save_run
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS
from sim.run import simulate as in_simulator
from tuner.earlier import RUNS, Earlier, Held, keep_inputs
from tuner.learning import by_virtual_trainers
from tuner.real_runs import DEFAULT, SPENT, RealRuns, Runner, budget_of, leg_steps_of, seeds_of
from tuner.recommendation import Arm, Recommendation
from tuner.resumption import Journal, Resumption, inputs_of
from tuner.search import Search, StepS, search
from tuner.served import refuse_unpriced, search_modes
from tuner.simulated.candidates import shortened, step_time
from tuner.space import search_space, way_of
from tuner.verify import Progress, verify
from tuner.ways import Ways, over_seeds, price_ways

Simulate = Callable[[Experiment], RunResult]
"""The seam to the simulator; ``sim.run.simulate`` is the one in use."""
_VIRTUAL_SEEDS = 16
"""With which the best ways of training are compared, at most."""
_LOCAL_SGD_FIELDS = ("localsgd", "localsgd_configs")
_COMPUTE = (("thread_num", ("thread_num",)), (OP_FUSION, ("build_strategy",)), (MIXED_PRECISION, ("amp", "amp_configs")))
"""Rules that change compute: their names, and the fields that they set."""


def tune(
    experiment: Experiment,
    *,
    out: Path = Path("runs"),
    progress: Progress | None = None,
    runner: Runner | None = None,
    simulate: Simulate | None = None,
    spent_s: Callable[[], float] | None = None,
    draft: Path | None = None,
    earlier: Callable[[Experiment], Held] | Path | None = None,
) -> tuple[Recommendation, Path]:
    """Recommend a strategy for the experiment, and return it with its folder below ``out``.

    The folder holds ``recommended.toml``, ``recommendation.json``, ``experiment.toml`` and ``runs/``; the strategy is also stored
    where ``strategy.auto`` finds it. ``progress`` is told what is being done, and how much of it. ``runner`` and ``simulate`` stand
    in for a launch of processes and for the simulator, beside which no virtual trainers are asked. ``spent_s`` says how many seconds of the
    budget, of all trainers together, are gone when real runs begin. Where ``draft`` is given the
    folder is made there, in place of what lies there, and stays: its caller moves it, and stores the strategy.
    ``earlier``: the folder of a tuning, or what says what of one still holds, which is not measured again.
    Raises ``ConfigError`` for what cannot be executed and ``WorkerFailed`` for processes that die; a tuning that was interrupted
    goes on after its last complete leg when the same experiment is tuned again below the same ``out``.
    """
    if experiment.strategy.mode == "ps":
        refuse_unpriced(experiment)
    refuse_metric_alone(experiment)
    if runner is None:
        from real.job.session import Session
        from real.supported import refuse_unsupported

        refuse_unsupported(experiment, experiment.strategy)  # before the search, not after it
    began = time.monotonic()
    beside = partial(Earlier.load(earlier).beside, inputs=inputs_of(())) if isinstance(earlier, Path) else earlier
    resumption = Resumption((), experiment, out) if runner is None else None
    if resumption is not None:
        resumption.claim()
    experiment = _profiled(experiment, out, resumption, _stage(progress, "profile"))
    found, step_s, left_out = _search(experiment, simulate, out, _stage(progress, "simulated trials"))
    learn = by_virtual_trainers if simulate is None else None
    simulate = simulate or in_simulator
    held = None if beside is None else beside(experiment)
    first = seeds_of(experiment).stop  # those that choose a way of training are not those that prove it
    known, learning = None if held is None else held.earlier.recommendation.learnt, _stage(progress, "virtual trainers")
    ways = price_ways(experiment, found, step_s, learn, out, learning, known, first)
    if learn is not None and ways.updates:  # one seed tells little: more of them for twice as many as there is room for
        tried = (*found.best(2 * experiment.tune.finalists, ways.others, ways.seconds), *filter(None, [found.advice]))
        best, seeds = [one.strategy for one in tried], range(first, first + _VIRTUAL_SEEDS)
        learning = _stage(progress, "virtual trainers of other seeds")
        ways = over_seeds(experiment, ways, best, learn, out, seeds, learning, limit_s=experiment.tune.search_seconds)
    arms, notes = _arms(experiment, found, ways)
    folder = _new_folder(experiment, out, draft if resumption is None else resumption.draft)
    runs = folder / RUNS
    notes += [] if held is None else [held.note]
    arms = [_simulated(arm, experiment, simulate, runs) for arm in arms]
    with Session(experiment, at_once=False) if runner is None else nullcontext(runner) as launched:
        measured_by = launched if resumption is None else Journal(launched, resumption.legs)
        journal = measured_by if isinstance(measured_by, Journal) else None
        gone_s = spent_s() if spent_s is not None else 0.0 if resumption is None else resumption.held_s()
        legs = RealRuns(
            experiment=experiment,
            runner=measured_by,
            folder=runs,
            step_s=arms[0].simulated_s,
            clock=time.perf_counter if journal is None else journal.clock,
            spent_s=gone_s if journal is None else max(0.0, gone_s - experiment.cluster.trainers * journal.kept_s),
            on_spent=spending(experiment, progress, resumption),
        )
        recommendation = verify(
            experiment,
            arms,
            legs,
            progress,
            others=_searched(found, ways),
            prepare=lambda arm: _simulated(_priced(arm, ways, experiment), experiment, simulate, runs),
            held=held,
        )
    cost_s = max(time.monotonic() - began, legs.spent_s / experiment.cluster.trainers)  # a resumed tuning has spent more than it took now
    if journal is not None and journal.num_replayed:
        notes.append(f"before an interruption it had run {counted(journal.num_replayed, 'leg')}")
    recommendation = dataclasses.replace(
        recommendation,
        trials=tuple(tried.trial for tried in found.tried),
        learnt=dict(ways.learnt),
        caveat=ways.said_beside(recommendation.strategy),
        advice_left_out=left_out,
        notes=(*_of_profile(experiment), *found.notes, *notes, *recommendation.notes, cost_note(recommendation, cost_s)),
        runs=tuple(run for arm in recommendation.arms for run in (arm.simulated_run, *arm.measured_runs) if run is not None),
    )
    recommendation.save(folder)
    if draft is None:
        folder = folder.rename(out / folder.name)
        store(experiment, recommendation, out)
    if resumption is not None:
        resumption.close()
    return recommendation, folder


def _search(
    experiment: Experiment, simulate: Simulate | None, out: Path, progress: Callable[[int, int], None] | None
) -> tuple[Search, StepS, tuple[str, ...]]:
    """The simulated trials, what simulates one more, and what of Fleet's advice was left out; of servers the modes, without advice."""
    short = shortened(experiment)
    step_s = step_time(short) if simulate is None else lambda strategy: step_s_of(simulate(short.replace(strategy=strategy)))
    if experiment.strategy.mode == "ps":
        return search_modes(experiment, step_s, progress), step_s, ()
    space = search_space(experiment)
    advised, left_out = advice_for(experiment, table_for(experiment))
    return search(experiment, space, advised, out=out, step_s=step_s, progress=progress), step_s, left_out


def _of_profile(experiment: Experiment) -> tuple[str, ...]:
    """What it says of other training; and that it was taken on a busy machine, or its times lack their stragglers."""
    profile = profile_of(experiment)
    if profile is None:
        return ()
    noise = None if profile.gradient_noise is None else profile.gradient_noise.statement
    return tuple(filter(None, (noise, profile.busy, profile.short_of(experiment))))


def _new_folder(experiment: Experiment, out: Path, draft: Path | None) -> Path:
    """A tuning's folder, in ``draft`` in place of what lies there, or below ``out``; with the experiment and what it was tuned with."""
    if draft is not None:
        shutil.rmtree(draft, ignore_errors=True)
    folder = (draft or out) / f"{experiment.name}-tune-{experiment.digest()}-{new_run_id()}"
    (folder / RUNS).mkdir(parents=True)
    experiment.save(folder / "experiment.toml")
    keep_inputs(folder, experiment, inputs_of(()))
    return folder


def store(experiment: Experiment, recommendation: Recommendation, out: Path) -> None:
    """Put the strategy where ``strategy.auto`` finds it for this model on these trainers."""
    keep(folder_of(out=out), key_of_profiled(experiment, table_for(experiment)), recommendation.strategy, recommendation.line)


def refuse_metric_alone(experiment: Experiment) -> None:
    """Raise ``ConfigError`` for ``tune.metric`` without a target."""
    if experiment.tune.metric is not None and experiment.workload.target_loss is None:
        hint = "set workload.target_loss; a script also calls fleet.report(loss=loss) before optimizer.step()"
        raise ConfigError("is looked at where a run reaches its target, and there is none", "tune.metric", experiment.tune.metric, hint)


def _profiled(experiment: Experiment, out: Path, resumption: Resumption | None, progress: Callable[[int, int], None] | None) -> Experiment:
    """The experiment with its profile: that of an interrupted tuning, which goes on, or a stored or new one."""
    known = None if resumption is None else resumption.experiment()
    if known is not None:
        return known
    if experiment.workload.model != LAYERS:
        from real.profile.measuring import ensure_profile

        experiment = ensure_profile(experiment, out, progress=progress)
    if resumption is not None:
        resumption.keep(experiment, 0.0)
    return experiment


def spending(experiment: Experiment, progress: Progress | None, resumption: Resumption | None = None) -> Callable[[float], None]:
    """Hears of spent seconds: keeps them for a tuning that goes on, and shows them beside the budget where there is one."""
    budget_s, _ = budget_of(experiment)

    def hear(spent_s: float) -> None:
        if resumption is not None:
            resumption.hold(spent_s)
        if progress is not None and math.isfinite(budget_s):
            progress(SPENT, round(spent_s), round(budget_s))

    return hear


def cost_note(recommendation: Recommendation, cost_s: float) -> str:
    """What a tuning of so many seconds cost, and after how many steps of the recommended strategy it has paid."""
    note = f"the tuning took {cost_s:.3g} s"
    if recommendation.verdict != "USE" or recommendation.speedup is None:
        return note
    if recommendation.to_target is not None:
        target = recommendation.arms[0].target
        saved_s = 0.0 if target is None or target.time_s is None else target.time_s * (1 - 1 / recommendation.to_target)
        return f"{note}; a training to the target then takes {saved_s:.3g} s less" if saved_s > 0 else note
    if recommendation.speedup <= 1:
        return note
    default_s = statistics.fmean(pair.default_s for pair in recommendation.pairs)
    finalist_s = default_s / recommendation.speedup
    steps = math.ceil(cost_s / (default_s - finalist_s))
    return f"{note}, which training with the recommendation has saved after {steps:,} steps ({steps * finalist_s:.3g} s)"


def _stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(stage, done, total)


def _searched(found: Search, ways: Ways) -> dict[DistributedStrategy, float]:
    """Simulated time of a step over the default's, of different strategies of the search, and of default and advice.

    Where virtual trainers have said what ways of training are worth: time to the target, of ways that arrive, in the search and beside it.
    """
    default, tried = found.default, [found.default, *([] if found.advice is None else [found.advice]), *found.ranked]
    if not ways.updates:
        return {one.strategy: one.trial.simulated_s / default.trial.simulated_s for one in tried}
    rates = dict.fromkeys((default.strategy.lr_scale, *(one.strategy.lr_scale for one in ways.others)))  # the search has one alone
    of_all = {one.strategy.replace(lr_scale=rate): one for one in tried for rate in rates} | {one.strategy: one for one in ways.others}
    by_way = {way_of(strategy): strategy for strategy in of_all}
    weights = {way: ways.weight(one) / ways.default_steps for way, one in by_way.items() if way in ways.updates and ways.arrives(one)}
    step_s = {strategy: one.trial.simulated_s / default.trial.simulated_s for strategy, one in of_all.items()}
    return {strategy: ratio * weights[way] for strategy, ratio in step_s.items() if (way := way_of(strategy)) in weights}


def _arms(experiment: Experiment, found: Search, ways: Ways) -> tuple[list[Arm], list[str]]:
    """The default, Fleet's advice where it is another strategy, the best candidates, and ways that only real runs can price."""
    chosen, finalists = [(DEFAULT, found.default)], experiment.tune.finalists
    notes = [*ways.notes]
    if found.advice is not None and found.advice.key != found.default.key:
        chosen.append(("advice", found.advice))
    elif found.advice is not None:
        notes.append("Fleet's advice comes to the same plan as the default, and is not run beside it")
    best = found.best(finalists, ways.others, ways.seconds) if ways.updates else (*found.best(finalists), *ways.others)
    chosen += [(f"candidate {number}", tried) for number, tried in enumerate(best, start=1)]
    arms = [Arm(name=name, strategy=tried.strategy, simulated_s=tried.trial.simulated_s) for name, tried in chosen]
    return [_priced(arm, ways, experiment) for arm in arms], notes


def _priced(arm: Arm, ways: Ways, experiment: Experiment) -> Arm:
    """With what its legs run, and what virtual trainers say."""
    found = ways.levels(arm.strategy, experiment.workload)
    paced = in_leg(found, (leg_steps_of(experiment) - OUTSIDE) // arm.strategy.gradient_merge_configs.k_steps)
    updates = ways.weight(arm.strategy) if way_of(arm.strategy) in ways.updates else None
    return dataclasses.replace(arm, virtual_updates=updates, paced_by=None if paced == arm.strategy else paced)


def _simulated(arm: Arm, experiment: Experiment, simulate: Simulate, runs: Path) -> Arm:
    """The arm with a stored simulated run of a leg's length, to lay beside its real ones."""
    workload = dataclasses.replace(experiment.workload, steps=leg_steps_of(experiment))
    stored = save_run(simulate(experiment.replace(strategy=arm.timed, workload=workload)), runs)
    assert stored.path is not None
    return dataclasses.replace(arm, simulated_run=stored.path.name, simulated_s=step_s_of(stored))


def advice_for(experiment: Experiment, table: LayerTable) -> Advice:
    """Fleet's advice on top of the experiment's strategy, without what this experiment cannot measure, which is listed with the reason.

    A rule that changes compute needs a layer table of its own in the profile. Local SGD needs a target that prices what it
    costs in loss, and a first decay within the steps that are measured. ``table`` is that of the experiment's own strategy.
    """
    size = sum(gradient.nbytes for gradient in table.by_readiness() if not gradient.sparse)
    base, device = experiment.strategy, experiment.run.device
    advised, listed = advice(experiment.workload, experiment.cluster, size, device=device, base=base)
    left_out = list(listed)
    without = _with_fields(advised, base, _LOCAL_SGD_FIELDS)
    first, measured = min((decay.step for decay in experiment.workload.lr_decay), default=0), leg_steps_of(experiment)
    late = f"step {first} lies after the {measured} steps that are measured" if first >= measured else None
    reason = "no workload.target_loss prices it" if experiment.workload.target_loss is None else late
    if reason is not None and without != advised:  # no leg would show what it costs and gains
        advised = without
        left_out.append(f"{LOCAL_SGD}: {reason}")
    strategy = _with_fields(advised, base, tuple(name for _, names in _COMPUTE for name in names))
    for what, names in _COMPUTE:
        candidate = _with_fields(strategy, advised, names)
        if candidate == strategy:
            continue
        try:
            table_for(experiment.replace(strategy=candidate))
        except ConfigError as error:
            name = f"thread_num = {advised.thread_num}" if what == "thread_num" else what
            left_out.append(f"{name}: {error.what}")
        else:
            strategy = candidate
    return Advice(strategy, tuple(left_out))


def _with_fields(strategy: DistributedStrategy, source: DistributedStrategy, names: tuple[str, ...]) -> DistributedStrategy:
    return strategy.replace(**{name: getattr(source, name) for name in names})
