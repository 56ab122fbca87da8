"""Jobs: an experiment to tune, with its profile and the processes that run its legs.

The processes are either the experiment's own trainers or those of a user's script.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleetbench.config import encode
from fleetbench.digests import json_digest
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.workload import LAYERS
from real.job.script_session import ScriptSession
from real.profile.measuring import profile_script
from tuner.budget import SECONDS_PER_HOUR, budget_of, with_leg_steps
from tuner.folder import Earlier, Folder, recent
from tuner.notes import Note, Remark, left_out
from tuner.real_runs import Runner
from tuner.verify import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An experiment to tune, and the processes that run its legs."""

    experiment: Experiment
    """Experiment with its profile."""
    runner: Runner
    """Runner of the experiment's legs."""
    held_s: Callable[[], float] = lambda: 0.0
    """Function that returns the trainer seconds so far; 0 if trainers are not held between legs."""
    notes: Callable[[], list[Note]] = list
    """Function that returns notes for readers of the verdict."""


@contextmanager
def own_trainers(asked: Experiment, folder: Folder, out: Path, runner: Runner | None, progress: Progress | None) -> Iterator[Job]:
    """Yield the job of an experiment's own trainers, which start with the first leg.

    ``runner``, if given, runs the legs instead.
    """
    experiment = folder.experiment() or asked
    if experiment.workload.model != LAYERS:
        from real.profile.measuring import ensure_profile

        experiment = ensure_profile(experiment, out, progress=stage(progress, "profile the model"))
    experiment = with_leg_steps(experiment)
    if runner is not None:
        yield Job(experiment=experiment, runner=runner)
        return
    from real.job.session import Session

    with Session(experiment, at_once=False) as session:
        yield Job(experiment=experiment, runner=session)


@dataclass(frozen=True, slots=True)
class Script:
    """A user's script."""

    command: tuple[str, ...]
    """Command that starts the script, as words."""
    workdir: Path | None = None
    """Folder in which the command starts. None: this process's folder."""
    seconds: float = 5.0
    """Seconds that one leg of the script's profile may take."""


@contextmanager
def script_of(
    script: Script, asked: Experiment, folder: Folder, out: Path, earlier: Earlier | None, progress: Progress | None
) -> Iterator[Job]:
    """Yield the job of a user's script, which is examined and profiled unless an earlier tuning has done so.

    That tuning is the interrupted one in ``folder``, ``earlier``, or a recent one below ``out``. Raises
    ``ConfigError`` if there is a target but the script reports no loss.
    """
    kept = folder.experiment()
    before = earlier or recent(out, folder.inputs)
    known = kept or (None if before is None else before.script(asked, folder.inputs))
    with ScriptSession(script.command, asked, known=known, workdir=script.workdir) as session:
        if kept is None and earlier is None and known is not None and before is not None:
            session.notes.append(f"the profile is that of {before.path.name}: the same script within the last hour")
        if asked.workload.target_loss is not None and session.experiment.workload.target_loss is None:
            hint = "call fleet.report(loss=loss) before optimizer.step(), or drop the target"
            raise ConfigError("the script reports no loss", "workload.target_loss", f"{asked.workload.target_loss:g}", hint)
        experiment = with_leg_steps(known or _profiled(session, out, script.seconds, progress))
        yield Job(
            experiment=experiment,
            runner=session,
            held_s=lambda: session.held_s,
            notes=lambda: _notes(asked, experiment, session),
        )


def stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """Return the progress callback of one stage; ``{}`` in its name stands for the total."""
    return None if progress is None else lambda done, total: progress(name.format(total), done, total)


def refuse_beyond_budget(session: ScriptSession, seconds: float) -> None:
    """Raise ``ConfigError`` if the next leg of the profile, which may take ``seconds``, may exceed the budget."""
    (budget_s, setting), trainers = budget_of(session.experiment), session.experiment.cluster.trainers
    if session.held_s + trainers * seconds > budget_s:
        gone = f"{budget_s / SECONDS_PER_HOUR:.3g} trainer hours, of which {session.held_s / SECONDS_PER_HOUR:.3g} are gone"
        raise ConfigError("the profile alone would take more", setting, gone, "raise it: after the profile come the legs that are compared")


def _profiled(session: ScriptSession, out: Path, seconds: float, progress: Progress | None) -> Experiment:
    """Measure the script's profile, store it in a file, and return the experiment with the file's path."""

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress("profile the script", done, total)
        if done < total:
            refuse_beyond_budget(session, seconds)

    taken = profile_script(session, seconds=seconds, progress=told)
    folder = out / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"script-{json_digest(encode(taken.profile))[:16]}.toml").resolve()
    taken.profile.save(path)
    return taken.experiment.replace(workload=dataclasses.replace(taken.experiment.workload, profile=str(path)))


def _notes(asked: Experiment, experiment: Experiment, session: ScriptSession) -> list[Note]:
    notes: list[Note] = [Remark(text=text) for text in session.notes]
    if session.hosts:
        trainers, hosts = counted(experiment.cluster.trainers, "trainer"), ", ".join(dict.fromkeys(session.hosts))
        notes.append(Remark(text=f"the verdict holds for {trainers} on {hosts}, started by the same command"))
    if experiment.cluster.nodes > 1 and experiment.cluster.trainers_per_node > 1 and asked.cluster.intra is None:
        slow = "the simulator took the link inside a node to be as slow as that between nodes"
        notes.append(left_out("cluster.intra", "is not declared", slow))
    return notes
