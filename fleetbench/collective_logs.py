"""Collective logs: times in the output of nccl-tests.

A run lists its ranks, then a row per size. It is of one kind of collective, among all ranks, if its rates are

    algbw = size / time,    busbw = 2 (n - 1) / n algbw,

as nccl-tests' doc/PERFORMANCE.md derives them; busbw is (n - 1) / n algbw for an all-gather and a
reduce-scatter. A line may start with anything: labels of ``mpirun --tag-output`` and of ``srun --label``, time
stamps, ``#`` or nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from fleetbench.errors import ConfigError
from fleetbench.file_kinds import read_file, text_of
from fleetbench.quantities import counted

NAME = "all_reduce"
KINDS = (NAME, "all_gather", "reduce_scatter")
"""Kinds of collectives that ``cluster.measured`` may read from a log. Except for all-reduce, the log must name
the kind, as nccl-tests does since 2.16."""
_TOLERANCE = 0.02
"""Largest relative error of a rate."""
_DIGIT = 0.011
"""Largest absolute error of a rate in GB/s, which is printed with two digits after the point, and of the time."""
_LARGE = 1.0
"""Least ``algbw`` in GB/s of a row whose rates identify the collective."""
_LINE = re.compile(
    r"Collective test starting:\s*(?P<name>\S+)"
    r"|\b(?P<setup>nThread) \d+ nGpus \d+"
    r"|\bRank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\b"
    r"|\b(?P<header>size\s+count\s+type\b.*\bbusbw\b.*)"
    r"|Out of bounds values\s*:\s*\d+\s+(?P<failed>FAILED)"
    r"|(?<![\w.])(?P<nbytes>\d+)\s+\d+\s+(?:u?int\d*|u?char|half|float|double|bfloat16|f8\w+|fp8\w*)\s+(?P<values>\S.*)"
)


class Row(NamedTuple):
    """Row of a run, for one size."""

    where: str
    nbytes: int
    values: Mapping[str, str]
    """Values by column, as printed. Of columns with one name the last counts, whose collectives are in place,
    as in training."""


@dataclass(slots=True)
class Run:
    """Output of one benchmark."""

    name: str = ""
    """Name of the collective, such as ``all_reduce``; empty if the output does not name it."""
    ranks: set[int] = field(default_factory=set)
    groups: set[str | None] = field(default_factory=set)
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    failed: bool = False
    """Whether some sum was wrong."""

    def add(self, where: str, nbytes: int, words: list[str]) -> None:
        """Add a row. A smaller size than before is of another run, whose beginning is missing: no more is added."""
        if self.rows and nbytes <= self.rows[-1].nbytes:
            self.columns = []
        elif nbytes and self.columns and len(words) >= len(self.columns):
            told = list(zip(self.columns, words, strict=False))
            self.failed |= any(name == "#wrong" and word not in ("0", "N/A") for name, word in told)
            self.rows.append(Row(where, nbytes, dict(told)))


class Collective(NamedTuple):
    """A correct collective."""

    where: str
    nbytes: int
    seconds: float
    ranks: int


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
    """Return a log's collectives by kind and number of ranks, in the form of ``Measured``."""
    hint = "name the output of nccl-tests, or write the points: { trainers = 8, points = [...] }"
    text = text_of(read_file(path, hint, "cluster.measured")) or ""
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    kinds = [kind for kind in KINDS if any(not _reason(run, kind) for run in _runs(text))]
    for kind in kinds or [NAME]:
        for one in all_reduces(text, path, lambda _: None, kind) or ():
            times.setdefault((kind, one.ranks), {}).setdefault(one.nbytes, []).append(one.seconds)
    if not times:
        raise ConfigError("is no output of nccl-tests", "cluster.measured", repr(path), hint)
    return [
        {
            "kind": kind,
            "trainers": ranks,
            "points": [{"nbytes": f"{nbytes} B", "took": f"{median(each) * 1e6:.3f} us"} for nbytes, each in sizes.items()],
        }
        for (kind, ranks), sizes in times.items()
    ]


def all_reduces(text: str, path: str, say: Callable[[str], None], kind: str = NAME) -> list[Collective] | None:
    """Return the correct collectives of a kind in a text; None if the text is no output of nccl-tests.

    ``say`` receives a note about rows that were left out. Raises ``ConfigError`` if no run is correct.
    """
    runs = list(_runs(text))
    if not runs:
        return None
    found: list[Collective] = []
    left_out: Counter[str] = Counter()
    for run in runs:
        if reason := _reason(run, kind):
            left_out[reason] += len(run.rows)
        else:
            found += [Collective(f"{path}, {row.where}", row.nbytes, float(row.values["time"]) * 1e-6, len(run.ranks)) for row in run.rows]
    words = "; ".join(f"{counted(number, 'row')} {reason}" for reason, number in left_out.items())
    if not found:
        hint = f"run {kind}_perf among all ranks, built with MPI=1 for several processes, with its check"
        raise ConfigError(f"holds no correct {kind.replace('_', '-')}", path, words, hint)
    if words:
        say(f"left out of {path}: {words}")
    return found


def _reason(run: Run, kind: str) -> str:
    """Return why a run is left out; empty if it is a correct collective of the kind among all ranks."""
    n = len(run.ranks)
    factor = (2 if kind == NAME else 1) * (n - 1) / max(1, n)
    reduces = [row.values.get("redop", "none") != "none" and row.values.get("root", "-1") == "-1" for row in run.rows]
    rates = [_number(row.values.get("algbw")) for row in run.rows]
    is_told = any(rate >= _LARGE for rate in rates) and not (n == 2 and "N/A" in run.rows[-1].values.values())
    wrong = {
        f"of {run.name}": run.name not in (kind, ""),
        "without a list of ranks": not n,
        "of one rank, which reduces nothing (nccl-tests without MPI)": n == 1,
        f"of {len(run.groups)} groups at once (NCCL_TESTS_SPLIT)": len(run.groups) > 1,
        "without a time of the collective": any("time" not in row.values for row in run.rows),
        "whose sums were wrong": run.failed,
        "of another collective, or too small to tell": not run.name and (kind != NAME or not all(reduces) or not is_told),
        f"whose algbw or busbw is not that of {n} ranks": not all(map(_fits, run.rows, [factor] * len(run.rows))),
    }
    return next((reason for reason, is_so in wrong.items() if is_so), "")


def _fits(row: Row, factor: float) -> bool:
    """Whether a row's rates are those of its size and time, and of a collective with this factor."""
    us, alg, bus = (_number(row.values.get(name)) for name in ("time", "algbw", "busbw"))
    if us <= 0:
        return False
    expected = row.nbytes * 1e-3 / us
    off = _DIGIT * (1 + expected / us) + _TOLERANCE * expected
    return abs(alg - expected) <= off and abs(bus - factor * alg) <= 2 * _DIGIT + _TOLERANCE * bus


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


def _runs(text: str) -> Iterator[Run]:
    """Yield the runs that have rows."""
    run = Run()
    for number, line in enumerate(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines(), 1):
        match = _LINE.search(line)
        if match is None:
            continue
        if match["name"] or (match["setup"] and (run.ranks or run.rows)):
            if run.rows:
                yield run
            run = Run(name=re.sub(r"_perf.*", "", (match["name"] or "").rpartition("/")[2]))
        elif match["rank"]:
            run.ranks.add(int(match["rank"]))
            run.groups.add(match["group"])
        elif match["header"]:
            run.columns = match["header"].split()[3:]
        elif match["failed"]:
            run.failed = True
        elif match["values"]:
            run.add(f"line {number}", int(match["nbytes"]), match["values"].split())
    if run.rows:
        yield run
