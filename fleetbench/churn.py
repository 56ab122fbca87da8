"""Churn: nodes that are preempted and come back, such as spot instances."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fleetbench.config import Config, at_least
from fleetbench.digests import read_text
from fleetbench.errors import ConfigError
from fleetbench.quantities import Nanoseconds, parse_duration

LONGEST = 10**17
"""Longest duration in ns, about three years. Sums of draws with longer means may exceed 64 bits."""
_TRACE = "cluster.churn.trace"
_CSV = "a CSV file has the header time_s,zone,nodes (zone may be left out) and rows such as 0,a,4"
_RATES = ("mean_down", "zone_mean_up", "duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Available(Config):
    """Number of nodes that a zone has from a time on, until its next row."""

    at: Nanoseconds
    """Time. The first row's is the start of the job, the last row's is the end of the simulation."""
    zone: str = ""
    """Name of the zone, or site."""
    nodes: int
    """Number of nodes that are there."""

    def _validate(self) -> None:
        at_least(self, 0, "at", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn(Config):
    """Nodes that leave and come back, by a ``trace`` or at random (``mean_up``), and what that costs a job.

    ``fleetbench sim`` and ``fleetbench tune --simulate-only`` simulate it (spot_instances.md). A real run
    preempts no node.
    """

    trace: tuple[Available, ...] = ()
    """Recorded availability, in order of time, with at most ``cluster.nodes`` nodes at a time. When a zone
    shrinks, its longest-running nodes leave. A text names a CSV file with the columns time_s, zone and nodes."""
    mean_up: Nanoseconds | None = None
    """Mean time until a node is preempted. Times are exponentially distributed."""
    mean_down: Nanoseconds = Nanoseconds(0)
    """Mean time until a preempted node is replaced; with 0, it is replaced at once. Exponential, too."""
    zones: int = 1
    """Number of zones. Node n of N is in zone n * ``zones`` // N."""
    zone_mean_up: Nanoseconds | None = None
    """Mean time until a whole zone is preempted at once. It is back after ``mean_down``. Default: never."""
    duration: Nanoseconds | None = None
    """Simulated time. Default: 250 * ``mean_up`` / ``cluster.nodes``, at most about three years."""
    checkpoint_time: Nanoseconds
    """Time that training stands still for a checkpoint."""
    checkpoint_interval: Nanoseconds | None = None
    """Time of training between two checkpoints, rounded up to whole rounds. Default: Daly's interval for the
    mean time between failures that the policy does not survive (``sim.churn.intervals``)."""
    restart_time: Nanoseconds
    """Time from a job's end, once enough nodes are there, to its first step: failure detection, start of
    processes, loading the checkpoint."""
    join_time: Nanoseconds | None = None
    """With elastic training: time from a new node's arrival until it can join at the end of a round: its
    start, and its copy of the state from a peer. Default: ``restart_time``."""
    regroup_time: Nanoseconds = Nanoseconds(0)
    """With elastic training: time that all trainers stand still when nodes have joined or left: detection, and
    new communicators."""
    least_nodes: int = 1
    """Least number of nodes that train. With fewer, the job waits."""
    rejoin: Literal["checkpoint", "restart"] = "checkpoint"
    """When synchronous training takes in a node that came back: at the next ``checkpoint``, after which the job
    restarts, or only at the next ``restart`` after a loss."""

    @property
    def join_ns(self) -> int:
        """``join_time`` with its default."""
        return self.restart_time if self.join_time is None else self.join_time

    def _validate(self) -> None:
        at_least(self, 10**9, "mean_up", "zone_mean_up", "duration", most=LONGEST)
        times = ("mean_down", "checkpoint_time", "checkpoint_interval", "restart_time", "join_time", "regroup_time")
        at_least(self, 0, *times, most=LONGEST)
        at_least(self, 1, "zones", "least_nodes")
        if bool(self.trace) == (self.mean_up is not None):
            given = "both" if self.trace else "neither"
            raise ConfigError("needs either a trace or mean_up", "trace", given, 'for example mean_up = "6 h"')
        if self.trace:
            self._check_trace()

    def _check_trace(self) -> None:
        unused = [name for name in _RATES if getattr(self, name)] + (["zones"] if self.zones > 1 else [])
        if unused:
            what, hint = f"belongs to mean_up, and a trace does not use it: {unused[0]}", "drop it, or the trace"
            raise ConfigError(what, unused[0], str(getattr(self, unused[0])), hint)
        known = set[tuple[int, str]]()
        for index, row in enumerate(self.trace):
            if index and row.at < self.trace[index - 1].at:
                raise _wrong_row("is earlier than the row before it", index, "at", f"{row.at / 1e9:g} s", "sort the rows by time")
            if (row.at, row.zone) in known:
                raise _wrong_row("names a zone twice at one time", index, "zone", repr(row.zone), "keep one of them")
            known.add((row.at, row.zone))
        if self.trace[-1].at == self.trace[0].at:
            hint = "the last row's time ends the simulation: repeat the last counts at a later time"
            raise ConfigError("has no two different times", "trace", f"{len(self.trace)} rows", hint)

    def check_nodes(self, nodes: int) -> None:
        """Raise ``ConfigError``, located below ``cluster``, if this needs more nodes than the cluster's ``nodes``."""
        counts: dict[str, int] = {}
        for index, row in enumerate(self.trace):
            counts[row.zone] = row.nodes
            is_last = index + 1 == len(self.trace) or self.trace[index + 1].at > row.at
            if is_last and sum(counts.values()) > nodes:
                what, hint = f"makes more nodes than cluster.nodes = {nodes}", "raise cluster.nodes to the most that may be there"
                raise _wrong_row(what, index, "nodes", f"{sum(counts.values())} in all zones", hint, "churn.")
        for name, value in (("least_nodes", self.least_nodes), ("zones", self.zones)):
            if value > nodes:
                raise ConfigError(f"is more than cluster.nodes = {nodes}", f"churn.{name}", repr(value), f"at most {nodes}")


def _wrong_row(what: str, index: int, field: str, value: str, hint: str, prefix: str = "") -> ConfigError:
    place = f"{prefix}trace[{index}].{field}"
    return ConfigError(f"row {index + 1} (line {index + 2} of a CSV file) {what}", place, value, hint)


def with_trace(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return undecoded experiment data in which a file named by ``cluster.churn.trace`` is replaced by its rows.

    Raises ``ConfigError``, with the number of the line, for a file that is no such table.
    """
    cluster = data.get("cluster")
    churn = cluster.get("churn") if isinstance(cluster, Mapping) else None
    if not isinstance(cluster, Mapping) or not isinstance(churn, Mapping) or not isinstance(path := churn.get("trace"), str):
        return data
    return {**data, "cluster": {**cluster, "churn": {**churn, "trace": _rows(path)}}}


def _rows(path: str) -> list[dict[str, Any]]:
    lines = list(csv.reader(read_text(path, _CSV, _TRACE).rstrip().splitlines()))
    header = [name.strip().lower() for name in lines[0]] if lines else []
    if not {"time_s", "nodes"} <= set(header) <= {"time_s", "zone", "nodes"}:
        raise ConfigError("line 1 is not the header of a trace", f"{_TRACE}: {path}", ",".join(header), _CSV)
    found = []
    for number, cells in enumerate(lines[1:], start=2):
        row = {name: cell.strip() for name, cell in zip(header, cells, strict=False)}
        try:
            at = parse_duration(f"{row['time_s']} s")
            found.append({"at": f"{at} ns", "zone": row.get("zone", ""), "nodes": int(row["nodes"])})
            is_right = len(cells) == len(header) and int(row["nodes"]) >= 0
        except (ConfigError, KeyError, ValueError):
            is_right = False
        if not is_right:
            what = f"line {number} has no time and number of nodes from 0"
            raise ConfigError(what, f"{_TRACE}: {path}", ",".join(cells), _CSV)
    return found
