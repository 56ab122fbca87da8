"""Observers: sums over all steps for a summary, the rows of a table, and the spans of a timeline."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.result import steps_table_of
from fleetbench.timeline import Span
from sim.arrays.interpreter import Seen
from sim.arrays.layout import Layout, Times
from sim.arrays.program import Script
from sim.execution import stream_and_name

Floats = npt.NDArray[np.float64]
PERCENTS = (50, 95, 99)
_MOMENTS = ("start", "end", "arrival")
_DURATIONS = ("read", "forward", "backward", "stall", "wait", "update")


class Observer(Protocol):
    """Keeps data of every step."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """Record one step of several blocks.

        ``steps`` are the indices of the steps. ``begins``, shape ``(num_blocks, 1)``, is added to all times
        in ``seen``. Further blocks in ``seen`` are ignored.
        """
        ...


class Sums:
    """Sums durations over ranks and counted steps, and keeps the counted steps' times."""

    def __init__(self, script: Script, bytes_sent: list[Fraction], first_counted: int, num_ranks: int) -> None:
        """``bytes_sent``: bytes that a rank sends in each program, as a mean over ranks."""
        self._script = script
        self._bytes_sent = bytes_sent
        self._first_counted = first_counted
        self._num_ranks = float(num_ranks)
        self._sums = dict.fromkeys(("compute", "wait", "stall", "update", "total"), 0.0)
        self._times: list[tuple[Times, float]] = []
        """Times of steps in ns, and the number of equal times that each of them stands for."""

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:  # noqa: ARG002  # durations do not depend on when a block begins
        """See ``Observer``."""
        count, first = len(steps), int(np.searchsorted(steps, self._first_counted))
        if first == count:
            return
        for name in self._sums:
            values = getattr(seen, name)
            own = values[first:count] if len(values) > 1 else values  # one row for all steps, or one column for all ranks
            alike = (count - first) / len(own) * self._num_ranks / own.shape[1]
            self._sums[name] += float(own.sum(dtype=np.float64)) * alike  # which may not fit 64 bits
        self._times.append((own.ravel(), self._num_ranks / own.shape[1]))  # of ``total``, the last name

    def _quantiles(self) -> list[float]:
        shares = [percent / 100 for percent in PERCENTS]
        values = np.concatenate([times for times, _ in self._times])
        if all(weight == 1 for _, weight in self._times):
            return [float(value) for value in np.quantile(values, shares, overwrite_input=True)]
        return quantiles(values, np.concatenate([np.broadcast_to(weight, times.shape) for times, weight in self._times]), shares)

    def totals(self, first_start_ns: int, last_end_ns: int) -> dict[str, Any]:
        """Return the summary's figures."""
        counted = range(self._first_counted, len(self._script.sequence))
        programs = Counter(self._script.sequence[self._first_counted :])
        rank_steps = self._num_ranks * len(counted)
        second = 1e9
        rest = {"exposed_comm": self._sums["stall"] - self._sums["wait"]}
        rest["other"] = self._sums["total"] - self._sums["compute"] - self._sums["stall"] - self._sums["update"]
        mean = {name: total / rank_steps / second for name, total in (self._sums | rest).items()}  # sums of whole ns: no rounding errors
        quantiles_s = {f"p{percent}": value / second for percent, value in zip(PERCENTS, self._quantiles(), strict=True)}
        return {
            "wall_s": (last_end_ns - first_start_ns) / second,
            "steps": len(counted),
            "step_s": {"mean": mean["total"]} | quantiles_s,
            **{f"{name}_s": mean[name] for name in ("compute", "wait", "exposed_comm", "update", "other")},
            "bytes_sent_per_trainer": round(sum(self._bytes_sent[program] * number for program, number in programs.items())),
            "rounds": [length for step in counted if (length := self._script.local_steps[step]) is not None],
        }


def quantiles(values: Times, weights: Floats, shares: Sequence[float]) -> list[float]:
    """Return quantiles of ``values``, each of which counts ``weights`` times.

    Between two neighbours they are interpolated linearly, as by numpy.
    """
    order = np.argsort(values)
    ends = np.cumsum(weights[order])
    positions = np.asarray(shares) * (ends[-1] - 1)
    low, high = (values[order[np.searchsorted(ends, to_whole(positions), side="right")]] for to_whole in (np.floor, np.ceil))
    return list(low + (high - low) * (positions - np.floor(positions)))


class TimelineSpans:
    """Keeps each rank's own spans that take time, and the spans of all collectives; see ``sim.reference``."""

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
            group = self._layout.groups[flight.operation.group]
            start, end = (group.to_ranks(times[:count] + begins) for times in (flight.start, flight.end))
            self._draw(*stream_and_name(flight.operation, several=self._several), start, end, group.members)

    def _draw(self, stream: str, name: str, start: Times, end: Times, shown: npt.NDArray[np.bool_]) -> None:
        """Add a span for every block and rank that is ``shown``."""
        begun, taken, drawn = np.broadcast_arrays(start, end - start, shown, np.empty((1, self._layout.num_ranks)))[:3]
        for block, rank in zip(*(indices.tolist() for indices in np.nonzero(drawn)), strict=True):
            self.spans.append(Span(rank, stream, name, int(begun[block, rank]), int(taken[block, rank])))


class StepTable:
    """Keeps the times of every rank and step."""

    def __init__(self, num_ranks: int, steps: range) -> None:
        self._steps = steps
        self._kept = {name: np.zeros((len(steps), num_ranks), dtype=np.int64) for name in (*_DURATIONS, *_MOMENTS)}

    def see(self, seen: Seen, steps: Times, begins: Times) -> None:
        """See ``Observer``."""
        for name in _DURATIONS:
            self._kept[name][steps] = getattr(seen, name)[: len(steps)]
        for name in _MOMENTS:
            self._kept[name][steps] = getattr(seen, name)[: len(steps)] + begins

    def frame(self, local_steps: Sequence[int | None], losses: Sequence[float | None], bytes_sent: Times) -> pd.DataFrame:
        """Return one row per rank and step.

        ``bytes_sent`` has shape ``(num_steps, num_ranks)``; the other arguments have one entry per step.
        """
        num_steps, ranks = self._kept["start"].shape
        flat = {f"{name}_ns": values.T.ravel() for name, values in self._kept.items()}
        in_step = np.tile(np.arange(num_steps), ranks)
        frame: dict[str, Any] = {"rank": np.repeat(np.arange(ranks), num_steps), "step": np.asarray(self._steps)[in_step]} | flat
        frame["arrival_ns"] = pd.arrays.IntegerArray(flat["arrival_ns"], flat["arrival_ns"] < 0)
        frame["local_steps"] = pd.array(local_steps, dtype="Int64").take(in_step)
        frame["loss"] = np.asarray(losses, dtype=np.float64)[in_step]
        return steps_table_of(pd.DataFrame(frame | {"bytes_sent": bytes_sent.T.ravel()}))
