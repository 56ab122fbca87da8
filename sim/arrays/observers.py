"""Observers: what is kept of every step: when it ends, sums for a summary, the rows of a table, the spans of a timeline."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.result import steps_table_of
from fleetbench.timeline import COMMUNICATION, Span
from sim.arrays.interpreter import Seen
from sim.arrays.layout import NEVER, Layout, Times
from sim.arrays.program import Script
from sim.execution import collective_name

Floats = npt.NDArray[np.float64]
PERCENTS = (50, 95, 99)
_FIELDS = ("start_ns", "read_ns", "forward_ns", "backward_ns", "stall_ns", "wait_ns", "update_ns", "end_ns", "arrival_ns")


class Observer(Protocol):
    """Keeps something of every step."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """One step of some blocks: the indices of the steps, and what is to be added to all times, shape ``(num_blocks, 1)``.

        ``seen`` may hold more blocks, which are to be left out.
        """
        ...


class EndTimes:
    """When each step first starts and last ends, over all ranks; ns."""

    def __init__(self, num_steps: int) -> None:
        self.first_start = np.zeros(num_steps, dtype=np.int64)
        self.last_end = np.zeros(num_steps, dtype=np.int64)

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``Observer``."""
        count = len(steps)
        self.first_start[steps] = seen.start[:count].min(axis=1) + begins[:, 0]
        self.last_end[steps] = seen.end[:count].max(axis=1) + begins[:, 0]

    def of_counted(self, first: int) -> tuple[int, int]:
        """The first start and the last end of the steps from index ``first`` on."""
        return int(self.first_start[first:].min()), int(self.last_end[first:].max())


class Sums:
    """Sums over ranks and counted steps, and the counted steps' times."""

    def __init__(self, script: Script, bytes_sent: list[Fraction], first_counted: int, num_ranks: int) -> None:
        """``bytes_sent``: of each program, in the mean over ranks."""
        self._script = script
        self._bytes_sent = bytes_sent
        self._first_counted = first_counted
        self._num_ranks = float(num_ranks)
        self._sums = dict.fromkeys(("compute", "wait", "stall", "update", "total"), 0.0)
        self._times: list[tuple[Times, float]] = []
        """Values, and how many equal ones each of them stands for."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:  # noqa: ARG002  # durations do not depend on when a block begins
        """See ``Observer``."""
        count, first = len(steps), int(np.searchsorted(steps, self._first_counted))
        if first == count:
            return
        total = (seen.end - seen.start)[first:count]
        durations = {"compute": seen.compute_end - seen.head_end, "wait": seen.wait, "stall": seen.stall, "update": seen.update}
        for name, values in durations.items():
            self._add(name, values[first:count] if len(values) > 1 else values, count - first)
        self._add("total", total, count - first)
        self._times.append((total.ravel(), self._num_ranks / total.shape[1]))

    def _add(self, name: str, durations: Times, num_steps: int) -> None:
        """``durations`` may have one row for all steps, and one column for all ranks. Their sum may not fit 64 bits."""
        alike = num_steps / len(durations) * self._num_ranks / durations.shape[1]
        self._sums[name] += float(durations.sum(dtype=np.float64)) * alike

    def _quantiles(self) -> list[float]:
        shares = [percent / 100 for percent in PERCENTS]
        values = np.concatenate([times for times, _ in self._times])
        if all(weight == 1 for _, weight in self._times):
            return [float(value) for value in np.quantile(values, shares, overwrite_input=True)]
        return quantiles(values, np.concatenate([np.broadcast_to(weight, times.shape) for times, weight in self._times]), shares)

    def totals(self, first_start_ns: int, last_end_ns: int) -> dict[str, Any]:
        """The summary's figures."""
        counted = range(self._first_counted, len(self._script.sequence))
        programs = Counter(self._script.sequence[self._first_counted :])
        rank_steps = self._num_ranks * len(counted)
        second = 1e9
        rest = {"exposed": self._sums["stall"] - self._sums["wait"]}
        rest["other"] = self._sums["total"] - self._sums["compute"] - self._sums["stall"] - self._sums["update"]
        mean = {
            name: total / rank_steps / second for name, total in (self._sums | rest).items()
        }  # whole ns until here: nothing is a rest of roundings
        quantiles_s = {f"p{percent}": value / second for percent, value in zip(PERCENTS, self._quantiles(), strict=True)}
        return {
            "wall_s": (last_end_ns - first_start_ns) / second,
            "steps": len(counted),
            "step_s": {"mean": mean["total"]} | quantiles_s,
            "compute_s": mean["compute"],
            "wait_s": mean["wait"],
            "exposed_comm_s": mean["exposed"],
            "update_s": mean["update"],
            "other_s": mean["other"],
            "bytes_sent_per_trainer": round(sum(self._bytes_sent[program] * number for program, number in programs.items())),
            "rounds": [length for step in counted if (length := self._script.local_steps[step]) is not None],
        }


def quantiles(values: Times, weights: Floats, shares: Sequence[float]) -> list[float]:
    """Quantiles of values of which each stands for so many equal ones: between two neighbours in proportion, as numpy's."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    found = []
    for share in shares:
        position = share * (ends[-1] - 1)
        low, high = (int(np.searchsorted(ends, index, side="right")) for index in (np.floor(position), np.ceil(position)))
        below, above = (float(values[order[min(index, len(order) - 1)]]) for index in (low, high))
        found.append(below + (above - below) * float(position - np.floor(position)))
    return found


class TimelineSpans:
    """Draws every rank's spans, those of its own that take time and all collectives'; see ``sim.reference``."""

    def __init__(self, layout: Layout, script: Script) -> None:
        self.spans: list[Span] = []
        self._layout = layout
        self._several = any(join.operation.communicator for program in script.programs for join in program.joins)

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``Observer``."""
        count = len(steps)
        for stream, name, start, end in seen.spans:
            self._draw(stream, name, start[:count] + begins, end[:count] + begins, (end > start)[:count])
        for flight in seen.flights:
            operation, group = flight.operation, self._layout.groups[flight.operation.group]
            stream = f"{COMMUNICATION} {operation.communicator}" if self._several else COMMUNICATION
            start, end = (group.to_ranks(times[:count] + begins) for times in (flight.start, flight.end))
            self._draw(stream, collective_name(operation), start, end, group.members)

    def _draw(self, stream: str, name: str, start: Times, end: Times, shown: npt.NDArray[np.bool_]) -> None:
        """A span of every step and rank that are ``shown``."""
        begun, taken, drawn = np.broadcast_arrays(start, end - start, shown, np.empty((1, self._layout.num_ranks)))[:3]
        for block, rank in zip(*(indices.tolist() for indices in np.nonzero(drawn)), strict=True):
            self.spans.append(Span(rank, stream, name, int(begun[block, rank]), int(taken[block, rank])))


class StepTable:
    """Keeps what every rank saw of every step."""

    def __init__(self, num_ranks: int, steps: range) -> None:
        self._steps = steps
        self._kept = {name: np.zeros((len(steps), num_ranks), dtype=np.int64) for name in _FIELDS}

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``Observer``."""
        count = len(steps)
        kept = self._kept
        kept["start_ns"][steps] = seen.start[:count] + begins
        kept["read_ns"][steps] = seen.read[:count] if len(seen.read) > 1 else seen.read
        kept["forward_ns"][steps] = seen.forward[:count]
        kept["backward_ns"][steps] = seen.compute_end[:count] - seen.head_end[:count] - seen.forward[:count]
        kept["stall_ns"][steps] = seen.stall[:count]
        kept["wait_ns"][steps] = seen.wait[:count]
        kept["update_ns"][steps] = seen.update[:count]
        kept["end_ns"][steps] = seen.end[:count] + begins
        arrival = np.full((1, 1), NEVER) if seen.arrival is None else seen.arrival[:count]
        kept["arrival_ns"][steps] = np.where(arrival == NEVER, NEVER, arrival + begins)

    def frame(self, local_steps: Sequence[int | None], losses: Sequence[float | None], bytes_sent: Times) -> pd.DataFrame:
        """One row a rank and step; ``bytes_sent`` has shape ``(num_steps, num_ranks)``, the others one entry a step."""
        num_steps, ranks = self._kept["start_ns"].shape
        flat = {name: values.T.ravel() for name, values in self._kept.items()}
        in_step = np.tile(np.arange(num_steps), ranks)
        frame: dict[str, Any] = {"rank": np.repeat(np.arange(ranks), num_steps), "step": np.asarray(self._steps)[in_step]} | flat
        frame["arrival_ns"] = pd.arrays.IntegerArray(flat["arrival_ns"], flat["arrival_ns"] == NEVER)
        frame["local_steps"] = pd.array(local_steps, dtype="Int64").take(in_step)
        frame["loss"] = np.asarray(losses, dtype=np.float64)[in_step]
        return steps_table_of(pd.DataFrame(frame | {"bytes_sent": bytes_sent.T.ravel()}))
