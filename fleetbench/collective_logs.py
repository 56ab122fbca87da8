"""Collective logs: times in the printed output of nccl-tests (2.0 and later).

A run counts as a whole or not at all. It counts if its name is that of the collective, no sum was wrong, and
the rates of all its rows are those of the listed ranks: as nccl-tests' doc/PERFORMANCE.md derives,

    busbw = 2 (n - 1) / n algbw    for an all-reduce, and (n - 1) / n algbw for the other kinds.

Versions before 2.16 print no name. Their runs count as all-reduces if they reduce without a root, and their
rates say so. A line may start with anything, such as the labels of ``mpirun --tag-output``.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from fleetbench.digests import read_text
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted

NAME = "all_reduce"
KINDS = (NAME, "reduce_scatter", "all_gather")
"""Kinds of collectives that ``cluster.measured`` may read from a log. Except for all-reduce, the log must name
the kind."""
_LINES: dict[str, str] = {
    "name": r"Collective test starting:\s*(?:\S*/)?(\w+?)_perf",
    "setup": r"\bnThread \d+ nGpus \d+",
    "rank": r"\bRank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\b",
    "header": r"\bsize\s+count\s+type\b.*\bbusbw\b.*",
    "failed": r"Out of bounds values\s*:\s*\d+\s+FAILED",
    "row": r"(?<![\w.])(\d+)\s+\d+\s+(?:u?int|u?char|half|float|double|bfloat|f8|fp8)\w*\s+(\S.*)",
}
_TELLING_GBPS = 0.5
"""Least ``algbw`` in GB/s whose printed digits tell collectives apart."""


class AllReduce(NamedTuple):
    """A correct all-reduce, or a collective of another kind, in place."""

    where: str
    nbytes: int
    seconds: float
    ranks: int


@dataclass(slots=True)
class _Run:
    """Output of one benchmark: ``rows`` have the line's number, the bytes, and the words by column."""

    name: str | None = None
    ranks: set[int] = field(default_factory=set)
    rows: list[tuple[int, int, dict[str, str]]] = field(default_factory=list)
    failed: bool = False


def with_measured(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return undecoded experiment data in which logs named by ``cluster.measured`` are replaced by their points.

    Raises ``ConfigError`` for a file that holds no correct collective.
    """
    cluster = data.get("cluster")
    if not isinstance(cluster, Mapping) or not isinstance(measured := cluster.get("measured", ()), str | Mapping | list):
        return data
    entries = measured if isinstance(measured, list) else [measured]
    found = [one for entry in entries for one in (_measured(entry) if isinstance(entry, str) else [entry])]
    return {**data, "cluster": {**cluster, "measured": found}}


def _measured(path: str) -> list[dict[str, Any]]:
    """Return a log's collectives by kind and number of ranks, in the form of ``Measured``.

    If a size occurs several times, its time is the median.
    """
    hint = "name the output of nccl-tests, or write the points: { trainers = 8, points = [...] }"
    text = read_text(path, hint, f"cluster.measured: {path}")
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    for kind in {run.name or NAME: None for run in _runs(text) if run.name in (None, *KINDS)} or {NAME: None}:
        for one in all_reduces(text, path, lambda _: None, kind) or ():
            times.setdefault((kind, one.ranks), {}).setdefault(one.nbytes, []).append(one.seconds)
    if not times:
        raise ConfigError("is no output of nccl-tests", "cluster.measured", repr(path), hint)
    return [
        {"kind": kind, "trainers": ranks, "points": [{"nbytes": f"{n} B", "took": f"{median(s) * 1e6:.3f} us"} for n, s in own.items()]}
        for (kind, ranks), own in times.items()
    ]


def all_reduces(text: str, path: str, say: Callable[[str], None], kind: str = NAME) -> list[AllReduce] | None:
    """Return the correct collectives of a kind in a text; None if the text has no rows of nccl-tests.

    ``say`` receives a note about runs that were left out. Raises ``ConfigError`` if no run is correct.
    """
    runs = _runs(text)
    found: list[AllReduce] = []
    left_out: Counter[str] = Counter()
    for run in runs:
        if (reason := _reason(run, kind)) is not None:
            left_out[reason] += len(run.rows)
        else:
            found += [AllReduce(f"{path}, line {line}", size, float(row["time"]) * 1e-6, len(run.ranks)) for line, size, row in run.rows]
    words = "; ".join(f"{counted(number, 'row')} {reason}" for reason, number in left_out.items())
    if runs and not found:
        hint = f"run {kind}_perf among all ranks, built with MPI=1 for several processes, with its check"
        raise ConfigError(f"holds no correct {kind.replace('_', '-')}", path, words, hint)
    if words:
        say(f"left out of {path}: {words}")
    return found if runs else None


def _reason(run: _Run, kind: str) -> str | None:
    """Return why a run is left out; None if it is a correct collective of the kind among all ranks."""
    n, rows = len(run.ranks), [row for _, _, row in run.rows]
    if (run.name or NAME) != kind:
        return f"of {run.name or 'a collective without a name'}"
    if n < 2:
        return "without several ranks (nccl-tests without MPI, or output without its list of ranks)"
    if run.failed:
        return "whose sums were wrong"
    factor = (2 if kind == NAME else 1) * (n - 1) / n
    rates = [(float(row["algbw"]), float(row["busbw"])) for row in rows]
    fits = all(abs(bus - factor * alg) <= 0.006 * (1 + factor) + 2e-3 * bus for alg, bus in rates)
    is_sum = all(row.get("redop", "none") != "none" and row.get("root", "-1") == "-1" and "N/A" not in row.values() for row in rows)
    if not fits or (run.name is None and not (is_sum and max(rates)[0] >= _TELLING_GBPS)):
        return f"that are not shown to be of an {kind.replace('_', '-')} among {n} ranks"
    return None


def _runs(text: str) -> list[_Run]:
    return [run for run in _read(text) if run.rows]


def _read(text: str) -> Iterator[_Run]:
    """Yield the runs: the benchmark's name, a line for each rank, then a header and rows."""
    run, columns = _Run(), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        kind, match = next(((kind, match) for kind, pattern in _LINES.items() if (match := re.search(pattern, line))), ("", None))
        if match is None:
            continue
        if kind in ("name", "setup", "header") and run.rows:
            yield run
            run, columns = _Run(), []
        if kind == "name":
            run.name = match[1]
        elif kind == "rank":
            run.ranks.add(int(match[1]))
        elif kind == "header":
            columns = match[0].split()[3:]
        elif kind == "failed":
            run.failed = True
        elif kind == "row" and "time" in columns and len(words := match[2].split()) >= len(columns):
            row = dict(zip(columns, words, strict=False))  # of columns with the same name the last counts: in place, as in training
            run.failed |= row.get("#wrong", "0") not in ("0", "N/A")
            if all(re.fullmatch(r"[\d.]+", row[name]) for name in ("time", "algbw", "busbw")):
                run.rows.append((number, int(match[1]), row))
    yield run
