"""Collective logs: times in the output of nccl-tests (2.16 and later), printed or as JSON (``-J FILE``).

A run counts if the output names its collective at the beginning and at the end, if all ranks took part in one
group, and if its rates are those of the collective among n ranks, as nccl-tests' doc/PERFORMANCE.md derives
them:

    algbw = size / time,    busbw = 2 (n - 1) / n algbw    ((n - 1) / n for other kinds than all-reduce).

A line may start with anything: labels of ``mpirun --tag-output`` and of ``srun --label``, time stamps, ``#``
or nothing.
"""

import json
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
KINDS = (NAME, "reduce_scatter", "all_gather")
"""Kinds whose times a cluster may take from a log."""
_TOLD = 1.0
"""GB/s from which two printed decimals tell a rate."""
_OFF = 0.02
"""Largest relative difference of a printed rate."""


class Row(NamedTuple):
    """Result for one size."""

    where: str
    """Location of the row: line, or index of the result."""
    nbytes: int
    us: float
    """Microseconds of one collective in place."""
    algbw: float
    """Algorithm bandwidth in GB/s, as printed."""
    busbw: float
    """Bus bandwidth in GB/s, as printed."""
    is_wrong: bool
    """Whether elements of the result were wrong."""


@dataclass(slots=True)
class Run:
    """One benchmark's output. Lines are added to it until the next benchmark begins."""

    name: str = ""
    """Name of the collective, as ``all_reduce``; empty if the output does not name it."""
    is_whole: bool = False
    """Whether the output ends with the same name."""
    num_ranks: int = 0
    groups: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)


class AllReduce(NamedTuple):
    """A correct all-reduce."""

    where: str
    nbytes: int
    seconds: float
    ranks: int


def with_measured(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an undecoded experiment with the points of the logs that ``cluster.measured`` names.

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
    text = text_of(read_file(path, hint, "cluster.measured")) or ""
    kinds = dict.fromkeys(run.name for run in _runs(text) if run.name in KINDS) or {NAME: None}
    times: dict[tuple[str, int], dict[int, list[float]]] = {}
    for kind in kinds:
        for one in all_reduces(text, path, lambda _: None, kind) or ():
            times.setdefault((kind, one.ranks), {}).setdefault(one.nbytes, []).append(one.seconds)
    if not times:
        raise ConfigError("is no output of nccl-tests", "cluster.measured", repr(path), hint)
    return [
        {
            "kind": kind,
            "trainers": ranks,
            "points": [{"nbytes": f"{nbytes} B", "took": f"{median(each) * 1e6:.3f} us"} for nbytes, each in by_size.items()],
        }
        for (kind, ranks), by_size in times.items()
    ]


def all_reduces(text: str, path: str, say: Callable[[str], None], kind: str = NAME) -> list[AllReduce] | None:
    """Return a text's correct all-reduces, or collectives of another kind; none if of another format.

    ``say`` receives a note about rows that were left out. Raises ``ConfigError`` if no row is correct.
    """
    runs = _runs(text)
    if not runs:
        return None
    found: list[AllReduce] = []
    left_out: Counter[str] = Counter()
    for run in runs:
        for row in run.rows:
            if reason := _reason(run, kind) or ("whose results were wrong" if row.is_wrong else ""):
                left_out[reason] += 1
            else:
                found.append(AllReduce(f"{path}, {row.where}", row.nbytes, row.us * 1e-6, run.num_ranks))
    words = "; ".join(f"{counted(number, 'row')} {reason}" for reason, number in left_out.items())
    if not found:
        hint = f"run {kind}_perf of nccl-tests 2.16 or later among all ranks, built with MPI=1 for several processes"
        raise ConfigError(f"holds no correct {kind.replace('_', '-')}", path, words, hint)
    if words:
        say(f"left out of {path}: {words}")
    return found


def _reason(run: Run, kind: str) -> str:
    """Return why the rows of a run are no collectives of the kind among all ranks; empty if they are."""
    if not run.name or not run.is_whole:
        return "of a run that its output does not name at its beginning and end"
    if run.name != kind:
        return f"of {run.name}"
    if len(run.groups) > 1:
        return f"of {len(run.groups)} groups at once (NCCL_TESTS_SPLIT)"
    if run.num_ranks < 2:
        return "of one rank, which exchanges nothing (nccl-tests without MPI)"
    factor = (2 if kind == NAME else 1) * (run.num_ranks - 1) / run.num_ranks
    rates = [
        (printed, expected)
        for row in run.rows
        for printed, expected in ((row.algbw, row.nbytes * 1e-3 / row.us), (row.busbw, factor * row.algbw))
        if min(row.algbw, row.busbw) >= _TOLD
    ]
    if any(abs(printed / expected - 1) > _OFF for printed, expected in rates):
        return f"whose rates are not those of {run.num_ranks} ranks"
    return ""


def _runs(text: str) -> list[Run]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours
    read = _of_json if plain.lstrip().startswith("{") else _of_text
    return [run for run in read(plain) if run.rows]


_NAMED = re.compile(r"Collective test (starting|concluded):\s*(\S+)")
_RANK = re.compile(r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\b")
_HEADER = re.compile(r"\bsize\s+count\s+type\b.*\bbusbw\b.*")
_ROW = re.compile(r"(?<![\w.])(\d+)\s+(\d+)\s+(?:u?int(?:8|32|64)?|u?char|half|float|double|bfloat16|f8\w+|fp8\w*)\s+(\S.*)")


def _of_text(text: str) -> Iterator[Run]:
    """Read printed tables: the name, a line for each rank, a header and rows, and the name again."""
    run, columns = Run(), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _NAMED.search(line):
            if match[1] == "starting":
                yield run
                run, columns = Run(name=_collective(match[2])), []
            else:
                run.is_whole = run.name == _collective(match[2])
                yield run
                run, columns = Run(), []
        elif match := _RANK.search(line):
            run.num_ranks += 1
            run.groups.add(int(match[2] or 0))
        elif match := _HEADER.search(line):
            columns = match[0].split()[3:]
        elif match := _ROW.search(line):
            values = dict(zip(columns, words := match[3].split(), strict=False))  # in place, which comes last, as training reduces
            if len(words) >= len(columns) and (us := _number(values.get("time"))) and int(match[1]):
                rates = _number(values.get("algbw")), _number(values.get("busbw"))
                run.rows.append(Row(f"line {number}", int(match[1]), us, *rates, is_wrong=_number(values.get("#wrong")) > 0))
    yield run


def _of_json(text: str) -> Iterator[Run]:
    """Read what ``-J FILE`` writes."""
    try:
        data = json.loads(text)
        devices = data["config"]["devices"]
        yield Run(
            name=_collective(data["args"][0]),
            is_whole=True,
            num_ranks=len(devices) * data["config"].get("nthreads", 1) * data["config"].get("ngpus", 1),
            groups={device.get("group", 0) for device in devices},
            rows=[
                Row(f"result {number}", result["size"], own["time"], own["alg_bw"], own["bus_bw"], is_wrong=bool(own["nwrong"]))
                for number, result in enumerate(data["results"], 1)
                if (own := result["in_place"])["time"] > 0
            ],
        )
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return


def _collective(program: str) -> str:
    """``all_reduce`` of ``./build/all_reduce_perf_mpi``."""
    return re.sub(r"_perf.*", "", program.replace("\\", "/").rpartition("/")[2])


def _number(text: str | None) -> float:
    """Return the number, or 0 if the text is none."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
