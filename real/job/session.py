"""Session: an experiment's trainers on this machine, which run many legs in one launch."""

import dataclasses
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fleetbench.experiment import Experiment
from fleetbench.result import RunResult, skip
from fleetbench.staleness import counts_of, load_of, quantiles_of
from fleetbench.support import changed_fields
from fleetbench.workloads.data.data import prepare
from fleetbench.workloads.models.registry import check_model
from real.communication.communicators import require_cuda
from real.emulated.model import refuse_table
from real.emulated.pace import lateness_of
from real.job.folder import EXPERIMENT
from real.job.launch import Progress, WorkerLaunch
from real.job.results import run_of
from real.leg import Leg
from real.processes.place import leave_folder, make_folder
from real.processes.roles import TUNING
from real.processes.started import QUIET, uninterrupted
from real.servers.hosts import local_endpoints
from real.servers.leg_servers import LegServers, loads_of
from real.supported import UNREALISED, is_emulated, not_emulated, refuse_unsupported
from real.testbed.noise import quietest, watching
from real.testbed.testbed import testbed_of

_UNREALISED = {f"cluster.{name}" for name in UNREALISED}


class LegSession(ABC):
    """Runs legs one after another. A context manager: entering starts the processes, leaving ends them.

    On an error or Ctrl-C they are killed; if a worker failed, its output is kept.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._within: Path | None = None
        """Parent of the session's folder; ``None``: the system's folder for temporary files."""
        self.startup_s = 0.0
        """Seconds that the next leg may need for another launch, as far as known."""
        self.foreign_cores: float | None = None
        """Mean number of cores that other programs used on this machine during the last leg; ``None``
        if not measured."""

    def __enter__(self) -> Self:
        self._folder = make_folder(self._within)
        try:
            self._start()
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._abort()

    @abstractmethod
    def run(self, leg: Leg, progress: Progress | None = None) -> RunResult:
        """Run one leg to its end. The result's experiment has the leg's strategy and steps."""

    def run_profile(self, leg: Leg) -> list[dict[str, Any]]:
        """Run a leg with ``profile`` set, and return every rank's layer times as plain data."""
        return [part["layer_times"] for part in self._parts(leg)]

    def together(self, legs: Sequence[Leg]) -> None:  # noqa: B027  # where all legs are of one launch, there is nothing to do
        """Announce the next legs, which will be compared and should share a launch if possible."""

    def _parts(self, leg: Leg, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Return every rank's part of a leg, by rank.

        Stores the machine's other load in ``foreign_cores``.
        """
        with watching(f"{TUNING}={self._folder}") as load:  # marks processes that are not children of this one
            parts = self._run(leg, progress)
        self.foreign_cores = load.cores
        return parts

    @abstractmethod
    def _run(self, leg: Leg, progress: Progress | None) -> list[dict[str, Any]]:
        """Run a leg, and return every rank's part, by rank."""

    @abstractmethod
    def _start(self) -> None:
        """Start the processes, in ``_folder``."""

    @abstractmethod
    def _end(self) -> None:
        """End the processes in good order."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill the processes that are left."""

    def _abort(self) -> None:
        error = sys.exc_info()[1]
        with uninterrupted():
            try:
                self._kill()
            finally:
                leave_folder(self._folder, error)


class Session(LegSession):
    """Legs of an experiment, whose trainers are launched on this machine.

    They start on entry or, without ``at_once``, at the first leg.

    Raises ``ConfigError`` for what cannot be executed, ``WorkerFailed`` with the rank if a worker breaks.
    """

    def __init__(self, experiment: Experiment, *, at_once: bool = True) -> None:
        super().__init__()
        self._at_once = at_once
        refuse_unsupported(experiment, experiment.strategy)
        if is_emulated(experiment):
            refuse_table(experiment, experiment.strategy)
        else:
            check_model(experiment.workload)
        if experiment.run.device == "cuda":
            require_cuda(experiment.cluster.trainers, experiment.run.backend)
        self._experiment = experiment
        self._launch: WorkerLaunch | None = None
        self._reports: list[dict[str, Any]] = []
        """Reports of the last leg's servers."""
        self._testbed = testbed_of(experiment)

    def run(self, leg: Leg, progress: Progress | None = None) -> RunResult:
        """Run one leg; see ``LegSession``."""
        parts = self._parts(leg, progress)
        loads = loads_of(self._reports)
        assert len({part["parameters"] for part in parts}) == 1, "trainers hold different parameters after a leg"
        result = run_of(
            self._experiment,
            leg,
            parts,
            self._reports,
            skipped=self._skipped(leg),
            testbed=None if self._testbed is None else self._testbed.summary(),
            lateness_s=lateness_of([part["lateness"] for part in parts]) if is_emulated(self._experiment) else None,
            staleness=quantiles_of(counts_of(loads)),
            server_load=load_of(loads) if loads else None,
            foreign_cores=self.foreign_cores,
        )
        record = None if self._testbed is None else self._testbed.record()
        return dataclasses.replace(result, testbed=record, peak_bytes=())  # peaks would cover all legs of the process so far

    def _start(self) -> None:
        if self._at_once:
            self._begin()

    def _begin(self) -> None:
        experiment = self._experiment
        if not is_emulated(experiment):
            prepare(experiment.workload, experiment.run.seed, self._folder / "data")
        run = experiment.run
        experiment.save(self._folder / EXPERIMENT)
        self._launch = WorkerLaunch(self._folder, run, experiment.cluster.trainers)
        command, environment = [sys.executable, "-P", "-m", "real.workloads.train", str(self._folder / EXPERIMENT)], run.environment
        if self._testbed is not None:
            self._testbed.open()
            self._testbed.verify()
            command, environment = self._testbed.command(command), {**environment, **self._testbed.environment}
        self._launch.start(command, environment)

    def _parts(self, leg: Leg, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Return every rank's part.

        A testbed checks the machine itself, and repeats a leg if it was not quiet.
        """
        if self._launch is None:
            self._begin()
        if self._testbed is None:
            return super()._parts(leg, progress)
        return self._run(leg, progress) if leg.profile else self._testbed.run(lambda: self._run(leg, progress))

    def _run(self, leg: Leg, progress: Progress | None) -> list[dict[str, Any]]:
        refuse_unsupported(self._experiment, leg.strategy)
        if is_emulated(self._experiment):
            refuse_table(self._experiment, leg.strategy)
        assert self._launch is not None
        with ExitStack() as stack:
            servers = None
            if leg.strategy.mode == "ps" and not leg.profile:
                servers = self._leg_servers(self._launch.num_orders, leg)
                stack.callback(servers.kill)
                servers.start()
                leg = dataclasses.replace(leg, endpoints=servers.endpoints)
            found = self._launch.run(leg, progress, None if servers is None else servers.check)
            self._reports = [] if servers is None else servers.end()
        if progress is not None:
            progress(leg.steps, leg.steps)
        return [part for _, part in sorted(found.items())]

    def _leg_servers(self, number: int, leg: Leg) -> LegServers:
        """Return servers for one leg, which end with it."""
        run, cluster, testbed = self._experiment.run, self._experiment.cluster, self._testbed
        return LegServers(
            self._folder / "servers" / str(number),
            self._folder / "log",
            local_endpoints(cluster.servers) if testbed is None else testbed.topology.server_endpoints,
            enter=None if testbed is None else lambda server, program: testbed.command(program, [testbed.topology.server_hosts[server]]),
            environment={**QUIET, **run.environment},
            trainers=cluster.trainers,
            timeout_s=run.timeout * 1e-9,
            startup_timeout_s=run.startup_timeout * 1e-9,
            record=leg.record,
        )

    def _skipped(self, leg: Leg) -> list[dict[str, str]]:
        cluster, launcher = self._experiment.cluster, f"launcher {self._experiment.run.launcher}"
        changed = {name for name, _ in changed_fields(cluster, "cluster")}
        if self._testbed is not None:
            skipped = self._testbed.skipped()
        else:
            skipped = [skip(name, f"{launcher} cannot realise it on one machine") for name in sorted(changed & _UNREALISED)]
            if cluster.servers and cluster.server_placement == "own":
                skipped.append(skip("cluster.server_placement", f"{launcher} puts all servers on this machine"))
            if cluster.nodes > 1:
                skipped.append(skip("cluster.nodes", f"{launcher} puts all trainers on this machine"))
        if cluster.churn is not None:
            skipped.append(skip("cluster.churn", "a real run preempts no node; fleetbench sim simulates the goodput"))
        if is_emulated(self._experiment):
            skipped += not_emulated(self._experiment, leg.strategy)
        return skipped

    def _end(self) -> None:
        if self._launch is not None:
            self._launch.end()

    def _kill(self) -> None:
        try:
            if self._launch is not None:
                self._launch.kill()
        finally:
            if self._testbed is not None:
                self._testbed.close()
            shutil.rmtree(self._folder / "data", ignore_errors=True)


def measure(experiment: Experiment, *, progress: Progress | None = None, record: bool = False) -> RunResult:
    """Run the experiment from its initial parameters, with one process per trainer; repeat it if the machine was busy.

    Raises ``ConfigError`` for what cannot be executed, ``WorkerFailed`` with the failed rank.
    """
    leg = Leg(
        strategy=experiment.strategy,
        steps=experiment.workload.steps,
        warmup_steps=experiment.run.warmup_steps,
        start="initial",
        evaluate=True,
        record=record,
    )
    with Session(experiment) as session:
        return quietest(lambda: session.run(leg, progress), lambda run: run.summary.foreign_cores)
