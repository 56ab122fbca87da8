"""ScriptSession: legs in a user's script, in successive launches of its command.

A launch is kept as long as possible: the next leg runs in the same processes. A new launch starts if a pair
begins and the last launch was used enough, if a leg starts from the initial parameters, if its strategy
changes something that a process can set only once, if a leg has failed, and if the script's own data end.
In that case the number of steps of one launch is known, and legs are cut to it.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetbench.config import decode
from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import Experiment
from fleetbench.fields import KNOBS, named
from fleetbench.plan.training import PLANNED
from fleetbench.quantities import counted
from fleetbench.result import RunResult
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from real.job.facts import Facts, experiment_of
from real.job.inside import SHARED
from real.job.launch import CommandLaunch, Progress
from real.job.results import LEAST_STEPS, run_of
from real.job.session import LegSession
from real.leg import Leg
from real.processes.attached import WAY_OUT
from real.processes.diagnosis import LegFailed, LegLost, require_finite
from real.processes.roles import TUNING
from real.processes.started import uninterrupted

Part = dict[str, Any]
RECORD = Leg(steps=10, warmup_steps=3, start="as_is")
"""First leg, which collects the script's facts."""
_MOST_LAUNCHES = 5
"""Largest number of launches for one leg."""
_USED = 0.25
"""Share of a launch's time to the end of its first leg. Once its later legs took longer than this share, the next
pair starts another launch, because launches differ."""


class ScriptSession(LegSession):
    """Runs legs in a user's script.

    Entering starts the command and describes the script in ``experiment``; leaving ends it.

    Raises ``ConfigError`` for a strategy or script that cannot be executed, and ``LegFailed``, naming the
    rank, if a leg fails; the session continues with the next leg.
    """

    experiment: Experiment

    def __init__(self, command: Sequence[str], base: Experiment, *, known: Experiment | None = None, workdir: Path | None = None) -> None:
        """``known``: the script's experiment from an interrupted session; if given, nothing starts until the first leg.

        ``workdir``: folder in which the command starts; by default this process's.
        """
        super().__init__()
        self._within = Path(os.environ[SHARED]) if SHARED in os.environ else None
        self._workdir = workdir
        self._command = tuple(command)
        self._base = base
        self._known = known
        self._launch: CommandLaunch | None = None
        self._num_launches = 0
        self._restart_part: tuple[object, ...] | None = None
        self._held_s = 0.0
        self.notes: list[str] = []
        """Notes about harmless problems."""
        self.hosts: tuple[str, ...] = ()
        """Hosts of the last launch, by rank."""
        self.capacity: int | None = None
        """Number of optimizer steps of the script until its data end, once known."""
        self._unattached: str | None = None
        """Reason why no process attached to the job, if the launch that set ``capacity`` made no step."""
        self._most: int | None = None
        """Largest number of steps of a leg, warm-up included; ``None`` unless a launch was too short for all legs of a
        comparison."""

    @property
    def held_s(self) -> float:
        """Trainer-seconds of all launches, each from start to end, including waits for orders."""
        return self._held_s + (0.0 if self._launch is None else self._launch.held_s)

    def run(self, leg: Leg, progress: Progress | None = None) -> RunResult:
        """Run one leg.

        Raises ``LegFailed`` if the script cannot run its strategy, or if a loss or parameter is not finite.
        """
        refuse_unexecuted(leg.strategy, "strategy", PLANNED, "the real executor")
        return run_of(self.experiment, leg, self._parts(leg, progress), foreign_cores=self.foreign_cores)

    def together(self, legs: Sequence[Leg]) -> None:
        """Announce legs as in ``LegSession``.

        They are cut so that one launch can run all of them. A launch that was used enough, or has too few steps left,
        is ended.
        """
        wanted = sum(leg.warmup_steps + leg.steps for leg in legs)
        if self.capacity is not None and wanted > self.capacity:
            share = self.capacity // len(legs)
            if share - legs[0].warmup_steps >= LEAST_STEPS and self._most != share:
                self._most = share
                what = f"the legs of a pair were cut to {share} steps with their warm-up: a launch of the script has {self.capacity}"
                self.notes.append(what)
        launch = self._launch
        if launch is None or not launch.num_steps:
            return
        first_s, *later_s = launch.orders_s
        if sum(later_s) > _USED * (launch.startup_s + first_s) or self._remaining(launch) < wanted:
            self._end()

    def _start(self) -> None:
        if self._known is not None:
            self.experiment = self._known
            return
        facts = decode(self._run(RECORD)[0]["facts"], Facts, "the script")
        self.experiment = experiment_of(self._base, facts, self._command)
        self.notes += facts.notes
        self._restart_part = restart_part(facts.strategy)
        declared, found = self._base.cluster.trainers, facts.trainers
        if declared not in (1, found):
            what = f"the script ran on {counted(found, 'trainer')}, not on the {declared} of the experiment's cluster"
            self.notes.append(what)

    def _run(self, leg: Leg, progress: Progress | None = None) -> list[Part]:
        """Return every rank's part of a leg, from a launch that can run it.

        A launch that breaks is replaced once.
        """
        lost = False
        for _ in range(_MOST_LAUNCHES):
            leg = self._fitted(leg)
            launch = self._launch_for(leg)
            try:
                num_before = launch.num_steps
                parts = launch.run(leg, progress)
                require_finite(parts, num_before, launch.output, profile=leg.profile)
            except BaseException as error:
                self._kill()
                if isinstance(error, LegLost) and not lost:
                    lost = True
                    self.notes.append(f"a launch broke, and its leg was run again by another: {error.where} {error.what}")
                    continue
                if isinstance(error, ConfigError) and leg.start != "as_is":
                    raise LegFailed(f"refused: {error.what}", error.where, error.value, error.hint) from error
                raise
            self.hosts = tuple(launch.ranks[rank] for rank in sorted(launch.ranks))
            self.startup_s = max(self.startup_s, launch.startup_s)
            if parts and all(part["complete"] for part in parts.values()):
                return self._in_order(parts, launch)
            self.capacity, self._unattached = launch.num_steps, None if launch.num_steps else launch.unattached
            self._kill()
        hint = "let it train as many steps in every run, and more than tune.leg_steps and run.warmup_steps together"
        raise LegLost("ends by itself, each time after another number of steps", "the command", f"{self.capacity} at last", hint)

    def _in_order(self, parts: dict[int, Part], launch: CommandLaunch) -> list[Part]:
        known = getattr(self, "experiment", None)
        if known is not None and known.cluster.trainers != len(launch.ranks):
            what = "the command starts another number of trainers than before"
            told, hint = f"{len(launch.ranks)}, before {known.cluster.trainers}", "tune again, without --from or with another --out"
            raise ConfigError(what, "the command", told, hint)
        return [parts[rank] for rank in sorted(parts)]

    def _fitted(self, leg: Leg) -> Leg:
        """Return the leg with at most the script's steps.

        Raises ``ConfigError`` if these are too few for any leg.
        """
        if self.capacity is None:
            return leg
        most = min(self.capacity, self._most or self.capacity)
        if leg.warmup_steps + leg.steps <= most:
            return leg
        steps = most - leg.warmup_steps
        if steps < LEAST_STEPS:
            what, hint = (
                "the script ends before a leg does",
                "give it more data or epochs, or --set run.warmup_steps=2 and a smaller tune.leg_steps",
            )
            if self.capacity == 0:
                what = what if self._unattached is None else f"{what}: {self._unattached}"
                way_out = "a step ends where optimizer.step() returns" if self._unattached is None else WAY_OUT
                hint = (
                    f"{way_out}; one that goes on from a checkpoint is to load none where {TUNING} is in its environment: "
                    "a launch before may have finished its training"
                )
            raise ConfigError(what, "the command", f"{self.capacity} optimizer steps", hint)
        return dataclasses.replace(leg, steps=steps)

    def _remaining(self, launch: CommandLaunch) -> float:
        return float("inf") if self.capacity is None else self.capacity - launch.num_steps

    def _launch_for(self, leg: Leg) -> CommandLaunch:
        part = None if leg.start == "as_is" else restart_part(leg.strategy)
        launch = self._launch
        if launch is not None and launch.num_orders:
            is_short = self._remaining(launch) < leg.warmup_steps + leg.steps
            is_other = part is not None and self._restart_part is not None and part != self._restart_part
            if launch.code is not None or is_short or is_other or leg.start == "initial":
                self._end()
        if self._launch is None:
            run, self._num_launches = self._base.run, self._num_launches + 1
            launch = CommandLaunch(self._command, self._folder / str(self._num_launches), run)
            launch.start(run.environment, self._workdir, leg.seed)
            self._launch, self._restart_part = launch, None
        self._restart_part = self._restart_part or part
        return self._launch

    def _end(self) -> None:
        try:
            if self._launch is not None:
                self._launch.end()
        except FleetbenchError as error:
            self.notes.append(f"{error.where} {error.what}, after its last leg, whose results are there")
        finally:
            self._kill()

    def _kill(self) -> None:
        launch, self._launch = self._launch, None
        if launch is not None:
            with uninterrupted():
                launch.kill()
            self._held_s += launch.held_s


def restart_part(strategy: DistributedStrategy) -> tuple[object, ...]:
    """Return the settings whose change needs a new launch: precision, compilation, recompute, ``fully_shard``."""
    spread = strategy.sharding_configs.reshard_after_forward
    of_calls = (strategy.fp16_allreduce, strategy.bf16_allreduce, None if type(spread) is bool else spread) if strategy.sharding else ()
    return (strategy.without(*KNOBS.keys() - named("restarts")), *of_calls)
