"""Tune: profile, search in the simulator, verify with real runs, recommend."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from fleetbench.advice import LOCAL_SGD, MIXED_PRECISION, OP_FUSION, Advice, advice
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.combination import OUTSIDE
from fleetbench.plan.layers import LayerTable
from fleetbench.plan.rounds import in_leg, levels
from fleetbench.profile import profile_of, table_for
from fleetbench.recommended import folder_of, keep, key_of_profiled
from fleetbench.result import RunResult, step_s_of
from fleetbench.store import save_run
from fleetbench.strategy import DistributedStrategy
from real.processes.diagnosis import LegFailed, LegLost
from sim.many.pool import Where
from sim.run import simulate as in_simulator
from tuner.budget import DEFAULT, leg_steps_of, seeds_of
from tuner.evidence import Evidence
from tuner.folder import Earlier, Folder
from tuner.jobs import Job, Script, own_trainers, script_of, stage
from tuner.learning import Learn, by_virtual_trainers
from tuner.notes import Cost, Note, Remark, left_out
from tuner.pytorch import bucket_sizes_mb
from tuner.real_runs import RealRuns, Runner
from tuner.recommendation import Arm, Recommendation
from tuner.search import Search, StepS, search, search_listed
from tuner.served import refuse_unpriced, search_modes
from tuner.simulated import sharded
from tuner.simulated.candidates import shortened, step_time
from tuner.space import search_space, way_of
from tuner.study import save_study
from tuner.verify import Progress, verify
from tuner.ways import Ways, over_seeds, price_ways

Simulate = Callable[[Experiment], RunResult]
"""Interface to the simulator; the default is ``sim.run.simulate``."""
_VIRTUAL_SEEDS = 16
"""Largest number of seeds with which the best ways of training are compared."""
_RULES = {
    LOCAL_SGD: ("localsgd", "localsgd_configs"),
    "thread_num": ("thread_num",),
    OP_FUSION: ("build_strategy",),
    MIXED_PRECISION: ("amp", "amp_configs"),
}
"""Fields that rules set which change training or compute, by rule."""


def tune(  # noqa: PLR0913  # tests replace two of them
    asked: Experiment,
    *,
    script: Script | None = None,
    out: Path = Path("runs"),
    earlier: Path | None = None,
    progress: Progress | None = None,
    begun: Callable[[], None] = lambda: None,
    runner: Runner | None = None,
    simulate: Simulate | None = None,
    on: Where = "local",
) -> tuple[Recommendation, Path]:
    """Recommend a strategy for an experiment, or a user's script, and return it with its folder.

    For a script, ``asked`` defines how to search and decide, and may set a target; the workload and the
    number of trainers are those that the script reports.

    The folder holds ``recommended.toml``, ``recommendation.json``, ``experiment.toml``, ``evidence.json`` and
    ``runs/``; the strategy is also stored for ``strategy.auto``. ``earlier``: the folder of a tuning whose
    valid results are not measured again. ``progress`` receives the current stage and its progress; ``begun``
    is called as soon as the tuning could be resumed after an interruption. ``runner`` and ``simulate`` replace
    the processes and the simulator; with ``simulate``, virtual trainers are not used. ``on``: see ``tuner.search``.

    A call with the same arguments and ``out`` continues an interrupted tuning after its last complete leg.
    Raises ``ConfigError`` if something cannot be executed or another process tunes the same, and
    ``WorkerFailed`` if processes die.
    """
    _refuse(asked, is_real=script is None and runner is None)
    began = time.monotonic()
    before = None if earlier is None else Earlier.load(earlier)
    folder = Folder(() if script is None else script.command, asked, out, earlier)
    folder.claim()
    own = own_trainers(asked, folder, out, runner, progress)
    try:
        with own if script is None else script_of(script, asked, folder, out, before, progress) as job:
            evidence, notes = _evidence(job, folder, before)
            begun()
            recommendation, runs = _measured(job, folder, evidence, out, progress, simulate, on)
    except LegLost:  # another try on this machine may succeed
        raise
    except LegFailed:  # the default's: its fix may be outside of the files in the folder's digest, so nothing is resumed
        folder.discard()
        raise
    experiment = job.experiment
    spent_s = runs.evidence.spent_s(experiment.cluster.trainers) / experiment.cluster.trainers
    took_s = max(time.monotonic() - began, spent_s)  # a resumed tuning has spent more than it took now
    told = (*recommendation.told, *notes, *job.notes(), Cost(took_s=took_s))
    buckets_mb = bucket_sizes_mb(experiment, recommendation.strategy)
    recommendation = dataclasses.replace(recommendation, told=told, buckets_mb=buckets_mb)
    path = folder.finish(recommendation, experiment, before)
    store(experiment, recommendation, out)
    return recommendation, path


def store(experiment: Experiment, recommendation: Recommendation, out: Path) -> None:
    """Store the strategy where ``strategy.auto`` finds it for this model on these trainers."""
    keep(folder_of(out=out), key_of_profiled(experiment, table_for(experiment)), recommendation.strategy, recommendation.line)


def _refuse(asked: Experiment, *, is_real: bool) -> None:
    """Raise ``ConfigError`` if the experiment cannot get a verdict, before anything is started."""
    if asked.strategy.mode == "ps":
        refuse_unpriced(asked)
    if asked.tune.metric is not None and asked.workload.target_loss is None:
        hint = "set workload.target_loss; a script also calls fleet.report(loss=loss) before optimizer.step()"
        raise ConfigError("is looked at where a run reaches its target, and there is none", "tune.metric", asked.tune.metric, hint)
    if is_real:
        from real.supported import refuse_unsupported

        refuse_unsupported(asked, asked.strategy)  # before the search, not after it
        if asked.strategy.sharding:
            hint = "--simulate-only chooses among the stages; fleetbench real measures one"
            raise ConfigError("leaves no model that the next leg could train", "strategy.sharding", "true", hint)


def _evidence(job: Job, folder: Folder, earlier: Earlier | None) -> tuple[Evidence, list[Note]]:
    """Return the evidence to start with, from the interrupted or the earlier tuning, and notes about changes.

    Unless the tuning is resumed, its folder is begun.
    """
    known = None if folder.experiment() is None else folder.evidence()
    inherited, notes = Evidence(), list[Note]()
    if earlier is not None:
        inherited, note = earlier.beside(job.experiment, folder.inputs)
        notes.append(note)
    if known is not None:
        return known.taken_up(), notes
    evidence = dataclasses.replace(inherited, before_s=job.held_s(), startup_s=job.runner.startup_s)
    if folder.experiment() is not None:
        notes.append(left_out("what was measured before an interruption", "is measured again", "it could not be read"))
    folder.begin(job.experiment, evidence)
    return evidence, notes


def _measured(
    job: Job,
    folder: Folder,
    evidence: Evidence,
    out: Path,
    progress: Progress | None,
    simulate: Simulate | None,
    on: Where,
) -> tuple[Recommendation, RealRuns]:
    """Search, ask virtual trainers, and verify; return the recommendation and the real runs."""
    experiment = job.experiment
    found, step_s = _search(experiment, simulate, out, stage(progress, "search {} strategies"), on)
    ways = _ways(experiment, found, step_s, by_virtual_trainers if simulate is None else None, out, progress)
    arms, notes = _arms(experiment, found, ways)

    simulated: dict[DistributedStrategy, RunResult] = {}

    def prepared(arm: Arm) -> Arm:
        """Complete an arm with the strategy of its legs, and with seconds per step from a simulated leg."""
        priced = _priced(arm, ways, experiment)
        workload = dataclasses.replace(experiment.workload, steps=leg_steps_of(experiment))
        run = (simulate or in_simulator)(experiment.replace(strategy=priced.timed, workload=workload))
        simulated[priced.timed] = run
        return dataclasses.replace(priced, simulated_s=step_s_of(run))

    arms = [prepared(arm) for arm in arms]
    if not evidence.outcomes:  # the search has held a script's trainers, too
        evidence = dataclasses.replace(evidence, before_s=max(evidence.before_s, job.held_s()))
    runs = RealRuns(
        experiment=experiment,
        runner=job.runner,
        folder=folder.runs,
        step_s=arms[0].simulated_s,
        evidence=evidence,
        keep=folder.keep,
    )
    recommendation = verify(experiment, arms, runs, progress, others=_searched(found, ways), prepare=prepared)
    stored = {strategy: save_run(run, folder.runs) for strategy, run in simulated.items()}
    with_runs = (dataclasses.replace(arm, simulated_run=_name(stored[arm.timed])) for arm in recommendation.arms)
    recommendation = dataclasses.replace(recommendation, arms=tuple(with_runs))
    recommendation = dataclasses.replace(
        recommendation,
        num_trials=len({one.strategy for one in (*found.different, *ways.others)}),
        caveat=ways.said_beside(recommendation.strategy, [arm.strategy for arm in recommendation.arms if arm.target is not None]),
        told=(*_of_profile(experiment), *found.notes, *notes, *recommendation.told),
    )
    trials = {
        one.strategy: (one.simulated_s, one.took_s, _of_trial(one.strategy, recommendation, ways)) for one in (*found.tried, *ways.others)
    }
    save_study(folder.path / "study.journal", experiment.name, trials)
    return recommendation, runs


def _of_trial(strategy: DistributedStrategy, found: Recommendation, ways: Ways) -> dict[str, str | float | None]:
    """Return the attributes of a strategy's trial in ``study.journal``."""
    arm = next((arm for arm in found.arms if arm.strategy == strategy), None)
    ran = None if arm is None else arm.rejected or ("recommended" if strategy == found.strategy else "not recommended")
    steps = ways.weight(strategy) if way_of(strategy) in ways.updates else None
    return {"arm": None if arm is None else arm.name, "verdict": ran or "did not run", "steps to the target": steps}


def _ways(experiment: Experiment, found: Search, step_s: StepS, learn: Learn | None, out: Path, progress: Progress | None) -> Ways:
    """Price ways of training by virtual trainers, with other seeds than those of the real runs that prove a gain."""
    first = seeds_of(experiment).stop
    ways = price_ways(experiment, found, step_s, learn, out, stage(progress, "virtual trainers"), first)
    if learn is None or not ways.updates:
        return ways
    # one seed says little: several seeds for the best ways, twice as many as there is room for
    tried = (*found.best(2 * experiment.tune.finalists, ways.others, ways.seconds), *filter(None, [found.advice]))
    best, seeds = [one.strategy for one in tried], range(first, first + _VIRTUAL_SEEDS)
    told = stage(progress, "virtual trainers of other seeds")
    return over_seeds(experiment, ways, best, learn, out, seeds, told, limit_s=experiment.tune.search_seconds)


def _search(
    experiment: Experiment, simulate: Simulate | None, out: Path, progress: Callable[[int, int], None] | None, on: Where
) -> tuple[Search, StepS]:
    """Simulate strategies; return the results, and the function that simulates another strategy.

    With parameter servers or sharding, a list of strategies replaces search space and advice.
    """
    short = shortened(experiment)
    step_s = step_time(short) if simulate is None else lambda strategy: step_s_of(simulate(short.replace(strategy=strategy)))
    if experiment.strategy.mode == "ps":
        return search_modes(experiment, step_s, progress), step_s
    if experiment.strategy.sharding:
        return search_listed(sharded.of_script(experiment), sharded.name_of, step_s, progress), step_s
    advised, not_taken = advice_for(experiment, table_for(experiment))
    found = search(experiment, search_space(experiment), advised, out=out, step_s=step_s, progress=progress, on=on)
    notes = [left_out(f"Fleet's advice of {what}", "is not taken", why) for what, _, why in (text.partition(": ") for text in not_taken)]
    return dataclasses.replace(found, notes=(*found.notes, *notes)), step_s


def _of_profile(experiment: Experiment) -> tuple[Remark, ...]:
    """Return notes about the profile: gradient noise, a busy machine, and layer times that exclude stragglers."""
    profile = profile_of(experiment)
    if profile is None:
        return ()
    noise = None if profile.gradient_noise is None else profile.gradient_noise.statement
    return tuple(Remark(text=text) for text in (noise, profile.busy, profile.short_of(experiment)) if text)


def _searched(found: Search, ways: Ways) -> dict[DistributedStrategy, float]:
    """Return the simulated step time over the default's of each different strategy of the search.

    If virtual trainers have priced the ways, it is the time to the target, for the ways that arrive.
    """
    default, tried = found.default, [found.default, *([] if found.advice is None else [found.advice]), *found.ranked]
    if not ways.updates:
        return {one.strategy: one.simulated_s / default.simulated_s for one in tried}
    rates = dict.fromkeys((default.strategy.lr_scale, *(one.strategy.lr_scale for one in ways.others)))  # the search has only the default's
    of_all = {one.strategy.replace(lr_scale=rate): one for one in tried for rate in rates} | {one.strategy: one for one in ways.others}
    by_way = {way_of(strategy): strategy for strategy in of_all}
    weights = {way: ways.weight(one) / ways.default_steps for way, one in by_way.items() if way in ways.updates and ways.arrives(one)}
    step_s = {strategy: one.simulated_s / default.simulated_s for strategy, one in of_all.items()}
    return {strategy: ratio * weights[way] for strategy, ratio in step_s.items() if (way := way_of(strategy)) in weights}


def _arms(experiment: Experiment, found: Search, ways: Ways) -> tuple[list[Arm], list[Note]]:
    """Return the arms, with notes: default, Fleet's advice, best candidates, and ways that only real runs can price."""
    chosen, finalists = [(DEFAULT, found.default)], experiment.tune.finalists
    notes = [*ways.notes]
    if found.advice is not None and found.advice.key != found.default.key:
        chosen.append(("advice", found.advice))
    elif found.advice is not None:
        notes.append(left_out("Fleet's advice", "is not run", "it comes to the same plan as the default"))
    best = found.best(finalists, ways.others, ways.seconds) if ways.updates else (*found.best(finalists), *ways.others)
    chosen += [(f"candidate {number}", tried) for number, tried in enumerate(best, start=1)]
    return [Arm(name=name, strategy=tried.strategy, simulated_s=tried.simulated_s) for name, tried in chosen], notes


def _priced(arm: Arm, ways: Ways, experiment: Experiment) -> Arm:
    """Complete an arm with the strategy of its legs, and with the results of virtual trainers."""
    workload = experiment.workload  # too high a learning rate would make a script's losses infinite
    found = levels(arm.strategy.replace(lr_scale=ways.lr_scale), workload.steps, workload.steps_per_epoch)
    paced = in_leg(found, (leg_steps_of(experiment) - OUTSIDE) // arm.strategy.gradient_merge_configs.k_steps)
    updates = ways.weight(arm.strategy) if way_of(arm.strategy) in ways.updates else None
    return dataclasses.replace(arm, virtual_updates=updates, paced_by=None if paced == arm.strategy else paced)


def _name(run: RunResult) -> str:
    """Return the name of the folder of a stored run."""
    assert run.path is not None
    return run.path.name


def advice_for(experiment: Experiment, table: LayerTable) -> Advice:
    """Return Fleet's advice on the experiment's strategy, and list the rules that a tuning cannot measure.

    A rule that changes compute needs a layer table of its own in the profile. Local SGD needs a target that
    prices its cost in loss, and a first decay of the learning rate within the measured steps. ``table``: layer
    table of the experiment's own strategy.
    """
    size = sum(gradient.nbytes for gradient in table.by_readiness() if not gradient.sparse)
    base, device, workload = experiment.strategy, experiment.run.device, experiment.workload
    advised, listed = advice(workload, experiment.cluster, size, device=device, base=base)
    first, measured = min((decay.step for decay in workload.lr_decay), default=0), leg_steps_of(experiment)
    late = f"step {first} lies after the {measured} steps that are measured" if first >= measured else None
    unpriced = "no workload.target_loss prices it" if workload.target_loss is None else late
    left_out, strategy = [*listed], _with_fields(advised, base, tuple(name for names in _RULES.values() for name in names))
    for what, names in _RULES.items():
        candidate = _with_fields(strategy, advised, names)
        if candidate == strategy:
            continue
        try:
            table_for(experiment.replace(strategy=candidate))
            reason = unpriced if what == LOCAL_SGD else None
        except ConfigError as error:
            reason = error.what
        if reason is None:
            strategy = candidate
        else:
            name = f"thread_num = {advised.thread_num}" if what == "thread_num" else what
            left_out.append(f"{name}: {reason}")
    return Advice(strategy, tuple(left_out))


def _with_fields(strategy: DistributedStrategy, source: DistributedStrategy, names: tuple[str, ...]) -> DistributedStrategy:
    return strategy.replace(**{name: getattr(source, name) for name in names})
