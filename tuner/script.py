"""Tune a user's script: its profile, a search in the simulator, trials in the living script, a verdict."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fleetbench.config import encode
from fleetbench.digests import json_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from real.job.script_session import ScriptSession
from real.processes.diagnosis import LegFailed, LegLost
from real.profile.measuring import profile_script
from tuner.earlier import Earlier, keep_inputs
from tuner.real_runs import SECONDS_PER_HOUR, budget_of
from tuner.recommendation import Recommendation
from tuner.resumption import Journal, Resumption, inputs_of
from tuner.tune import refuse_metric_alone, spending, store, tune
from tuner.verify import Progress

SECONDS = 5.0
"""That one of the profile's legs may take."""


def tune_script(
    command: Sequence[str],
    base: Experiment,
    *,
    out: Path = Path("runs"),
    workdir: Path | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
    kept: Callable[[], None] | None = None,
    earlier: Path | None = None,
) -> tuple[Recommendation, Path]:
    """Recommend a strategy for the script that ``command`` starts in ``workdir``, or here, and return it with its folder below ``out``.

    It is also stored for the script's model on its trainers, where ``strategy.auto`` finds it.

    ``base`` says how to search and decide, and may name a target; what is trained, and on how many
    trainers, is found out. A tuning that was interrupted goes on with what it had; ``kept`` is called
    when there is something, which is after the profile. ``earlier``: see ``tune``; a script that has not changed is not profiled again.
    Raises ``ConfigError``
    for what cannot be executed or is being tuned by another process already, ``LegFailed`` where the script fails with its own strategy.
    """
    refuse_metric_alone(base)
    before = None if earlier is None else Earlier.load(earlier)
    resumption = Resumption(command, base, out)
    resumption.claim()
    known = resumption.experiment()
    inputs = inputs_of(command)
    found = known or (None if before is None else before.script(base, inputs))
    try:
        with ScriptSession(command, base, known=found, workdir=workdir) as session:
            if base.workload.target_loss is not None and session.experiment.workload.target_loss is None:
                hint = "call fleet.report(loss=loss) before optimizer.step(), or drop the target"
                raise ConfigError("the script reports no loss", "workload.target_loss", f"{base.workload.target_loss:g}", hint)
            experiment = found or _profiled(session, out, seconds, progress)
            if known is None:
                resumption.keep(experiment, session.held_s)
            if kept is not None:
                kept()
            before_s = 0.0 if known is None else resumption.held_s()

            def held_s() -> float:
                total = before_s + session.held_s
                resumption.hold(total)
                return total

            journal = Journal(session, resumption.legs, held_s)
            recommendation, folder = tune(
                experiment,
                out=out,
                runner=journal,
                progress=progress,
                spent_s=held_s,
                draft=resumption.draft,
                earlier=None if before is None else partial(before.beside, inputs=inputs),
            )
    except LegLost:  # the machine may do better another time
        raise
    except LegFailed:  # the script's own strategy: what is mended need not show in the script's file
        resumption.close()
        raise
    notes = _notes(base, experiment, session, journal.num_replayed)
    recommendation = dataclasses.replace(recommendation, notes=(*recommendation.notes, *notes))
    recommendation.save(folder)
    keep_inputs(folder, experiment, inputs)
    folder = folder.rename(out / folder.name)
    store(experiment, recommendation, out)
    resumption.close()
    return recommendation, folder


def _profiled(session: ScriptSession, out: Path, seconds: float, progress: Progress | None) -> Experiment:
    """The session's experiment with the file of its profile, which is named by what it holds."""
    spent = spending(session.experiment, progress)

    def told(done: int, total: int) -> None:
        spent(session.held_s)
        if progress is not None:
            progress("profile", done, total)
        if done < total:
            refuse_beyond_budget(session, seconds)

    taken = profile_script(session, seconds=seconds, progress=told)
    folder = out / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"script-{json_digest(encode(taken.profile))[:16]}.toml").resolve()
    taken.profile.save(path)
    return taken.experiment.replace(workload=dataclasses.replace(taken.experiment.workload, profile=str(path)))


def refuse_beyond_budget(session: ScriptSession, seconds: float) -> None:
    """Raise ``ConfigError`` where the profile's next leg, of so many seconds, may lie beyond the budget."""
    (budget_s, setting), trainers = budget_of(session.experiment), session.experiment.cluster.trainers
    if session.held_s + trainers * seconds > budget_s:
        gone = f"{budget_s / SECONDS_PER_HOUR:.3g} trainer hours, of which {session.held_s / SECONDS_PER_HOUR:.3g} are gone"
        raise ConfigError("the profile alone would take more", setting, gone, "raise it: after the profile come the legs that are compared")


def _notes(base: Experiment, experiment: Experiment, session: ScriptSession, num_replayed: int) -> list[str]:
    """What a reader of the verdict must know beside it."""
    notes = list(session.notes)
    if session.hosts:
        hosts = ", ".join(dict.fromkeys(session.hosts))
        notes.append(f"it holds for {counted(experiment.cluster.trainers, 'trainer')} on {hosts}, started by the same command")
    if experiment.cluster.nodes > 1 and experiment.cluster.trainers_per_node > 1 and base.cluster.intra is None:
        notes.append("cluster.intra is not declared: the simulator took the link inside a node to be as slow as that between nodes")
    since = " since the interruption" if num_replayed else ""
    notes.append(f"the script held its trainers for {session.held_s / SECONDS_PER_HOUR:.2g} trainer hours{since}")
    return notes
