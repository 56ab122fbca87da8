"""Sights: what is kept of what ranks saw: the ends of steps, sums, the table of steps, and the spans of a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.result import COLUMNS, Totals
from fleetbench.timeline import COMMUNICATION, Span
from sim.arrays.groups import NEVER, Group, Groups, Times
from sim.arrays.lanes import Seen
from sim.arrays.script import Script
from sim.spans import collective_name

Floats = npt.NDArray[np.float64]
PERCENTS = (50, 95, 99)
_SECOND = 1e9
_FIELDS = ("start", "forward", "backward", "wait", "stall", "update", "end", "arrival")


class Ends:
    """When each step first starts and last ends, over all ranks; ns."""

    def __init__(self, num_steps: int) -> None:
        self.first_start = np.zeros(num_steps, dtype=np.int64)
        self.last_end = np.zeros(num_steps, dtype=np.int64)

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``Sight``."""
        count = len(steps)
        self.first_start[steps] = seen.start[:count].min(axis=1) + begins[:, 0]
        self.last_end[steps] = seen.end[:count].max(axis=1) + begins[:, 0]

    def of_counted(self, first: int) -> tuple[int, int]:
        """The first start and the last end of the steps from index ``first`` on."""
        return int(self.first_start[first:].min()), int(self.last_end[first:].max())


def waits(seen: Seen, count: int) -> Times:
    """The part of each stall until the slowest was ready for the step's last collective."""
    if seen.arrival is None:
        return np.zeros((1, 1), dtype=np.int64)
    arrival, stall = seen.arrival[:count], seen.stall[:count]
    latest = np.maximum(arrival.max(axis=1, keepdims=True), 0)
    return np.asarray(np.minimum(np.maximum(latest - np.maximum(np.maximum(arrival, 0), seen.compute_end[:count]), 0), stall))


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
        """See ``Sight``."""
        skipped = int(np.searchsorted(steps, self._first_counted))
        count = len(steps)
        if skipped == count:
            return
        total = (seen.end[:count] - seen.start[:count])[skipped:]
        self._add("compute", (seen.compute_end[:count] - seen.head_end[:count])[skipped:], count - skipped)
        self._add("wait", waits(seen, count)[skipped:] if seen.arrival is not None else waits(seen, count), count - skipped)
        self._add("stall", seen.stall[:count][skipped:] if len(seen.stall) > 1 else seen.stall, count - skipped)
        self._add("update", seen.update[:count][skipped:] if len(seen.update) > 1 else seen.update, count - skipped)
        self._add("total", total, count - skipped)
        if total.shape[1] == 1:
            self._times.append((total[:, 0], self._num_ranks))
        else:
            self._times.append((total.ravel(), 1.0))

    def _add(self, name: str, durations: Times, num_steps: int) -> None:
        """``durations`` may have one row for all steps, and one column for all ranks. Their sum may not fit 64 bits."""
        rows = num_steps / len(durations)
        if durations.shape[1] == 1:
            self._sums[name] += float(durations.sum(dtype=np.float64)) * rows * self._num_ranks
        else:
            self._sums[name] += float(durations.sum(dtype=np.float64)) * rows

    def _quantiles(self) -> list[float]:
        shares = [percent / 100 for percent in PERCENTS]
        values = np.concatenate([times for times, _ in self._times])
        if all(weight == 1 for _, weight in self._times):
            return [float(value) for value in np.quantile(values, shares, overwrite_input=True)]
        return quantiles(values, np.concatenate([np.broadcast_to(weight, times.shape) for times, weight in self._times]), shares)

    def totals(self, first_start_ns: int, last_end_ns: int) -> Totals:
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
        return Totals(
            wall_s=(last_end_ns - first_start_ns) / second,
            steps=len(counted),
            step_s={"mean": mean["total"]}
            | {f"p{percent}": value / second for percent, value in zip(PERCENTS, self._quantiles(), strict=True)},
            compute_s=mean["compute"],
            wait_s=mean["wait"],
            exposed_comm_s=mean["exposed"],
            update_s=mean["update"],
            other_s=mean["other"],
            bytes_sent_per_trainer=round(sum(self._bytes_sent[program] * number for program, number in programs.items())),
            rounds=tuple(length for step in counted if (length := self._script.local_steps[step]) is not None),
        )


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


class Drawn:
    """Keeps every rank's spans, those of its own that take time and all collectives'; see ``sim.reference``."""

    def __init__(self, groups: Groups, num_ranks: int) -> None:
        self._groups = groups
        self._num_ranks = num_ranks
        self._kept: list[tuple[str, str, Times, Times, Group | None]] = []
        self._several = False

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``sim.arrays.engine.Sight``."""
        count = len(steps)
        for stream, name, start, end, group in seen.spans:
            self._keep(stream, name, start[:count] + begins, end[:count] + begins, group)
        for flight in seen.flights:
            operation = flight.operation
            self._several = self._several or operation.communicator > 0
            group = self._groups[operation.group]
            start, end = (group.to_ranks(times[:count] + begins) for times in (flight.start, flight.end))
            self._keep(f"{COMMUNICATION} {operation.communicator}", collective_name(operation), start, end, group)

    def spans(self) -> Iterator[Span]:
        """All of them, rank by rank within each kind."""
        for stream, name, start, end, group in self._kept:
            is_collective = stream.startswith(COMMUNICATION)
            shape = (max(len(start), len(end)), self._num_ranks)
            taken = np.broadcast_to(end - start, shape)
            begun = np.broadcast_to(start, shape)
            drawn = np.broadcast_to(group.members, shape) if is_collective and group is not None else taken > 0
            shown = stream if self._several or not is_collective else COMMUNICATION
            for block, rank in zip(*np.nonzero(drawn), strict=True):
                yield Span(int(rank), shown, name, int(begun[block, rank]), int(taken[block, rank]))

    def _keep(self, stream: str, name: str, start: Times, end: Times, group: Group | None) -> None:
        self._kept.append((stream, name, start, end, group))


class Frame:
    """Keeps what every rank saw of every step."""

    def __init__(self, num_ranks: int, steps: range) -> None:
        self._steps = steps
        self._kept = {name: np.zeros((len(steps), num_ranks), dtype=np.int64) for name in _FIELDS}

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``sim.arrays.engine.Sight``."""
        count = len(steps)
        kept = self._kept
        kept["start"][steps] = seen.start[:count] + begins
        kept["end"][steps] = seen.end[:count] + begins
        kept["forward"][steps] = seen.forward[:count]
        kept["backward"][steps] = seen.compute_end[:count] - seen.head_end[:count] - seen.forward[:count]
        kept["wait"][steps] = waits(seen, count)
        kept["stall"][steps] = seen.stall[:count]
        kept["update"][steps] = seen.update[:count]
        if seen.arrival is None:
            kept["arrival"][steps] = NEVER
        else:
            arrival = seen.arrival[:count]
            kept["arrival"][steps] = np.where(arrival == NEVER, NEVER, arrival + begins)

    def table(self, local_steps: Sequence[int | None], losses: Sequence[float | None], bytes_sent: Times) -> pd.DataFrame:
        """One row a rank and step; ``bytes_sent`` has shape ``(num_steps, num_ranks)``, the others one entry a step."""
        num_steps, ranks = self._kept["start"].shape
        flat = {name: np.ascontiguousarray(values.T).ravel() for name, values in self._kept.items()}
        known = flat["forward"] + flat["backward"] + flat["stall"] + flat["update"]
        arrival = np.where(flat["arrival"] == NEVER, np.nan, flat["arrival"] / _SECOND)
        lengths = pd.array([pd.NA if length is None else length for length in local_steps], dtype="Int64")
        table = pd.DataFrame(
            {
                "rank": np.repeat(np.arange(ranks, dtype=np.int64), num_steps),
                "step": np.tile(np.asarray(self._steps, dtype=np.int64), ranks),
                "start_s": flat["start"] / _SECOND,
                "forward_s": flat["forward"] / _SECOND,
                "backward_s": flat["backward"] / _SECOND,
                "wait_s": flat["wait"] / _SECOND,
                "exposed_comm_s": (flat["stall"] - flat["wait"]) / _SECOND,
                "update_s": flat["update"] / _SECOND,
                "other_s": (flat["end"] - flat["start"] - known) / _SECOND,
                "arrival_s": arrival,
                "local_steps": lengths.take(np.tile(np.arange(num_steps), ranks)),
                "loss": np.tile(np.asarray([np.nan if loss is None else loss for loss in losses]), ranks),
                "bytes_sent": np.ascontiguousarray(np.broadcast_to(bytes_sent, (num_steps, ranks)).T).ravel(),
            }
        )
        return table[list(COLUMNS)]
