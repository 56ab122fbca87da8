"""Stage: the testbed under a session. Built and verified when the session starts, watched while it measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import skip
from real.testbed.ground import Testbed
from real.testbed.network import is_rootless
from real.testbed.noise import Trial, quietly
from real.testbed.topology import num_hosts, topology_of, unrealised

T = TypeVar("T")
LAUNCHER = "testbed"
_OWN_VARIABLE = "GLOO_SOCKET_IFNAME"


class Stage:
    """Where a session's workers run. States: new, open, closed.

    A cluster of one host has no link: its stage builds nothing and changes nothing. Raises ``ConfigError``
    for what no testbed can be built from; ``open`` raises ``EnvironmentLacks`` where this machine cannot
    hold it, and where a link is off.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._cluster = experiment.cluster
        self._hosts = num_hosts(experiment.cluster)
        if self._hosts > 1:
            topology_of(experiment.cluster)
        self._testbed: Testbed | None = None
        self._trial: Trial[Any] | None = None
        if experiment.run.backend != "gloo":
            raise ConfigError("the testbed's links carry gloo", "run.backend", repr(experiment.run.backend), 'set run.backend = "gloo"')
        if _OWN_VARIABLE in experiment.run.environment:
            where, value = f"run.environment.{_OWN_VARIABLE}", experiment.run.environment[_OWN_VARIABLE]
            raise ConfigError("is the testbed's to set: every host has one interface", where, repr(value), "leave it out")

    @property
    def environment(self) -> Mapping[str, str]:
        """What the workers' environment must say."""
        return Testbed.environment if self._testbed is not None else {}

    def open(self) -> None:
        """Build and verify."""
        if self._hosts == 1:
            return
        self._testbed = Testbed(self._cluster).__enter__()
        self._testbed.verify()

    def close(self) -> None:
        """Take it down, in whatever state it is."""
        if self._testbed is not None:
            self._testbed.close()
            self._testbed = None

    def command(self, program: Sequence[str]) -> list[str]:
        """The command by which a worker becomes ``program`` on its host."""
        return list(program) if self._testbed is None else self._testbed.command(program)

    @property
    def server_endpoints(self) -> tuple[str, ...]:
        """``host:port`` of every parameter server on its host; none where nothing is built, and servers stay where the driver is."""
        return self._testbed.topology.server_endpoints if self._testbed is not None else ()

    def server_command(self, server: int, program: Sequence[str]) -> list[str]:
        """The command by which a process becomes ``program`` on a server's host."""
        return list(program) if self._testbed is None else self._testbed.command(program, [self._testbed.topology.server_hosts[server]])

    def run(self, measure: Callable[[], T]) -> T:
        """Measure, again where the machine was not quiet."""
        if self._testbed is None:
            return measure()
        trial = quietly(self._testbed, measure)
        self._trial = trial
        return trial.value

    def skipped(self) -> list[dict[str, str]]:
        """Entries of ``skipped``: what is not realised, and why the last measurement does not count, if it does not."""
        if self._testbed is None:
            return unrealised(self._cluster, latency=True)
        entries = self._testbed.skipped()
        if self._trial is not None and not self._trial.counts:
            tries = len(self._trial.blocks)
            entries.append(skip("testbed.quiet", f"measured {tries} times, and void each time: {'; '.join(self._trial.blocks[-1].void)}"))
        return entries

    def summary(self) -> dict[str, Any] | None:
        """The short record of the last measurement; none where there was no link."""
        if self._testbed is None or self._trial is None:
            return None
        block = self._trial.blocks[-1]
        return {
            "hosts": self._testbed.topology.num_hosts,
            "rootless": is_rootless(),
            "largest_link_error": max((abs(rate.error) for rate in self._testbed.links), default=None),
            "counts": self._trial.counts,
            "void_runs": self._trial.num_void,
            "foreign_cores": block.noise.foreign_cores,
            "stolen_cores": block.noise.stolen_cores,
            "retransmits": block.noise.retransmits,
            "timeouts": block.noise.timeouts,
            "reorders": block.noise.reorders,
            "sentinel_moved": block.moved,
        }

    def record(self) -> dict[str, Any] | None:
        """All of it, for ``testbed.json``."""
        if self._testbed is None or self._trial is None:
            return None
        blocks = [block.to_dict() for block in self._trial.blocks]
        return {"schema": 1, **self._testbed.record(), **(self.summary() or {}), "blocks": blocks}


def stage_of(experiment: Experiment) -> Stage | None:
    """The stage that the experiment's launcher asks for; none for every other launcher."""
    return Stage(experiment) if experiment.run.launcher == LAUNCHER else None
