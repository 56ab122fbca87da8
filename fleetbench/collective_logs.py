"""Collective logs: times in the output of nccl-tests (2.0 and later, and its JSON), and of osu_allreduce.

Readers find runs and their rows. For all formats, one function then decides which rows are correct
collectives of one kind among all ranks. It checks the run's name, the number of groups that ran at once,
``redop``, ``root``, ``#wrong``, and that

    algbw = size / time,    busbw = 2 (n - 1) / n algbw,

as nccl-tests' doc/PERFORMANCE.md derives them. busbw is (n - 1) / n algbw for an all-gather, a reduce-scatter
and an all-to-all, and algbw for others. A line may start with anything: labels of ``mpirun --tag-output`` and
of ``srun --label``, time stamps, ``#`` or nothing.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from statistics import median
from typing import Any, NamedTuple

from fleetbench.errors import ConfigError
from fleetbench.file_kinds import read_file, text_of
from fleetbench.quantities import counted

NAME = "all_reduce"
KINDS = (NAME, "reduce_scatter", "all_gather")
"""Kinds of collectives that ``cluster.measured`` may read from a log. Except for all-reduce, the log must name
the kind."""
_MODERN = ["size", "count", "type", "redop", "root", *(2 * ["time", "algbw", "busbw", "#wrong"])]
"""Columns of nccl-tests 2.13 and later, for a table that was copied without its header."""
_UNCHECKED = "N/A"
_OTHER = "of another collective"


class Row(NamedTuple):
    """Row of a benchmark's output, for one size."""

    where: str
    """Location of the row: number of its line, or index of the result in JSON."""
    nbytes: int
    us: str
    """Time of one collective in place, in microseconds as printed; empty if the row has no such time."""
    rates: tuple[str, str] | None = None
    """``algbw`` and ``busbw`` in GB/s, as printed."""
    redop: str = ""
    root: str = "-1"
    wrong: tuple[str, ...] = ()
    """Numbers of wrong elements, out of place and in place, as printed; ``N/A`` if they were not counted."""


@dataclass(slots=True)
class Run:
    """Output of one benchmark. A reader adds rows until the next benchmark begins."""

    name: str | None = None
    """Name of the collective, such as ``all_reduce``; None if the output does not name it."""
    num_ranks: int | None = None
    ranks: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    failed: bool = False
    """Whether the output reports results out of bounds at its end, but does not say in which rows."""

    @property
    def n(self) -> int | None:
        """Number of ranks that the output lists."""
        return self.num_ranks or len(self.ranks) or None


class AllReduce(NamedTuple):
    """A correct all-reduce, or a collective of another kind."""

    where: str
    nbytes: int
    seconds: float
    ranks: int | None
    """Number of ranks; None if the output does not give it."""


def with_measured(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return undecoded experiment data in which logs named by ``cluster.measured`` are replaced by their points.

    Raises ``ConfigError`` for a file that holds no correct collective, or does not give the number of ranks.
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
    kinds = dict.fromkeys(run.name or NAME for run in _runs(text) if run.name is None or run.name in KINDS) or {NAME: None}
    times: dict[tuple[str, int | None, int], list[float]] = {}
    for kind in kinds:
        for one in all_reduces(text, path, lambda _: None, kind) or ():
            times.setdefault((kind, one.ranks, one.nbytes), []).append(one.seconds)
    if not times or any(ranks is None for _, ranks, _ in times):
        what = "does not say how many ranks took part" if times else "is no output of nccl-tests"
        raise ConfigError(what, "cluster.measured", repr(path), hint)
    found: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for (kind, ranks, nbytes), seconds in times.items():
        found.setdefault((kind, ranks), []).append({"nbytes": f"{nbytes} B", "took": f"{median(seconds) * 1e6:.3f} us"})
    return [{"kind": kind, "trainers": ranks, "points": points} for (kind, ranks), points in found.items()]


def all_reduces(text: str, path: str, say: Callable[[str], None], kind: str = NAME) -> list[AllReduce] | None:
    """Return the correct collectives of a kind in a text; None if the text has an unknown format.

    ``say`` receives notes about rows that were left out. Raises ``ConfigError`` if no row is correct.
    """
    runs = _runs(text)
    if not runs:
        return None
    found: list[AllReduce] = []
    left_out: Counter[str] = Counter()
    num_unchecked = 0
    for run in runs:
        n, reasons = _reasons(run, kind)
        left_out.update(filter(None, reasons))
        kept = [row for row, reason in zip(run.rows, reasons, strict=True) if reason is None]
        num_unchecked += sum(_UNCHECKED in row.wrong for row in kept)
        found += [AllReduce(f"{path}, {row.where}", row.nbytes, float(row.us) * 1e-6, n) for row in kept]
    words = "; ".join(f"{counted(number, 'row')} {reason}" for reason, number in left_out.items())
    if not found:
        hint = f"run {kind}_perf among all ranks, built with MPI=1 for several processes, with its check"
        raise ConfigError(f"holds no correct {kind.replace('_', '-')}", path, words, hint)
    if words:
        say(f"left out of {path}: {words}")
    if any(one.ranks is None for one in found):
        say(f"{path} does not say how many ranks took part: they are taken for all trainers of the experiment")
    if num_unchecked:
        say(f"{path}: the benchmark did not check the sums of {counted(num_unchecked, 'row')}")
    return found


def _runs(text: str) -> list[Run]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours
    return next((runs for read in READERS if (runs := [run for run in read(plain) if run.rows])), [])


def _reasons(run: Run, kind: str) -> tuple[int | None, list[str | None]]:
    """Return a run's number of ranks and, for each row, why it is left out.

    The reason is None for a correct collective of the kind. The rates of small rows do not identify the
    collective; such rows count if all other rows of their run fit. In a run without a name, at least one row
    has to identify it.
    """
    by_rates = _ranks_by_rates(run.rows) if kind == NAME else None
    n = max(run.n or 0, by_rates or 0) or None  # output that was copied may lack some ranks
    reasons = [_reason(run, row, n, kind) for row in run.rows]
    if kind != NAME:
        return n, reasons
    is_mixed = any(reason and reason.startswith(_OTHER) for reason in reasons)
    told_of = None if is_mixed else n
    tells = [reason is None and _tells(row, told_of) for row, reason in zip(run.rows, reasons, strict=True)]
    if not is_mixed and (run.name is not None or any(tells)):
        return n, reasons
    small = f"{_OTHER}, or too small to tell"
    return n, [reason or (None if own else small) for reason, own in zip(reasons, tells, strict=True)]


def _reason(run: Run, row: Row, n: int | None, kind: str) -> str | None:
    us, has_rates = _number(row.us) or 1.0, row.rates is not None
    rate = row.nbytes * 1e-3 / us
    off = rate / us * _half_digit(row.us)
    most = 2 if kind == NAME else 1
    is_like = _has_factor(row, *((most / 2, most) if n is None else [most * (n - 1) / n] * 2))
    has_redop = row.redop not in ("", "none")
    alg, _ = row.rates or ("", "")
    wrong: dict[str, bool] = {
        f"of {run.name}": run.name != kind and (run.name is not None or kind != NAME),
        f"of {len(run.groups)} groups at once (NCCL_TESTS_SPLIT)": len(run.groups) > 1,
        "of 0 bytes": not row.nbytes,
        "without a time of the collective": not row.us,
        f"{_OTHER}, without redop or with a root": has_redop == (kind == "all_gather") or row.root != "-1",
        "whose sums were wrong": run.failed or any(_number(one) for one in row.wrong),
        f"{_OTHER}, whose results in place are not checked": len({one == _UNCHECKED for one in row.wrong}) > 1,
        "of a collective without a name": run.name is None and not has_rates,
        "of one rank, which reduces nothing (nccl-tests without MPI)": has_rates and n == 1,
        "whose algbw is not size / time": has_rates and not _is_within(alg, rate, rate, off),
        f"{_OTHER}: busbw / algbw is not that of {n or 'any number of'} ranks": has_rates and not is_like,
    }
    return next((reason for reason, is_so in wrong.items() if is_so), None)


def _tells(row: Row, n: int | None) -> bool:
    """Whether a row's rates identify an all-reduce. With two ranks, an unchecked send-receive has the same ones."""
    if row.rates is None:
        return False
    if n == 2:
        return not _has_factor(row, 0.0, 0.99) and _UNCHECKED not in row.wrong
    return not _has_factor(row, 0.0, 1.0)


def _ranks_by_rates(rows: Sequence[Row]) -> int | None:
    """Return the number of ranks n from busbw = 2 (n - 1) / n algbw, in the most precise row.

    None unless exactly one number fits.
    """
    rates = [(_number(row.rates[0]), _number(row.rates[1]), row) for row in rows if row.rates]
    above = [one for one in rates if not _has_factor(one[2], 0.0, 1.0)] or rates
    alg, bus, best = max(above, key=lambda one: one[0], default=(0.0, 0.0, None))
    if best is None or not alg <= bus < 2 * alg:
        return None
    n = round(2 * alg / (2 * alg - bus))
    factors = {other: 2 * (other - 1) / other for other in (n - 1, n, n + 1) if other > 1}
    fitting = [other for other, factor in factors.items() if _has_factor(best, factor, factor)]
    return fitting[0] if len(fitting) == 1 else None


def _has_factor(row: Row, low: float, high: float) -> bool:
    """Whether busbw / algbw is between ``low`` and ``high``, within the precision of the printed digits."""
    alg, bus = row.rates or ("", "")
    return _is_within(bus, low * _number(alg), high * _number(alg), high * _half_digit(alg))


def _is_within(printed: str, low: float, high: float, off: float) -> bool:
    slack = 1.01 * (off + _half_digit(printed)) + 1e-9 * high
    return low - slack <= _number(printed) <= high + slack


def _number(text: str) -> float:
    """Return the number in a text, or 0 if the text is no finite number."""
    try:
        return float(text) if math.isfinite(float(text)) else 0.0
    except ValueError:
        return 0.0


def _half_digit(text: str) -> float:
    """Return half a unit of the last digit of a printed number."""
    try:
        exponent = Decimal(text).as_tuple().exponent
    except InvalidOperation:
        return 0.0
    return 0.5 * 10.0 ** (exponent if isinstance(exponent, int) else 0)


# Readers: each finds the runs of its format in a text, and none in others


def _of_nccl_tests(text: str) -> Iterator[Run]:
    """Yield the runs in printed output: the benchmark's name, a line for each rank, then a header and rows."""
    run, columns = Run(), _MODERN
    for number, line in enumerate(text.splitlines(), 1):
        kind, match = _recognised(line)
        if match is None:
            continue
        if (kind == "name" or (kind in ("setup", "rank") and run.rows)) or (kind == "setup" and run.ranks):
            yield run
            run, columns = Run(), _MODERN
        if kind in ("name", "concluded"):
            run.name = _collective(match[1])
        elif kind == "rank":
            run.ranks.add(int(match[1]))
            run.groups.add(int(match[2] or 0))
        elif kind == "header":
            columns = match[0].split()
        elif kind == "end":
            run.failed |= match[1] == "FAILED" and "error" in columns
        elif kind == "row":
            run.rows.append(_row(f"line {number}", match, columns))
    yield run


_TYPES = r"u?int(?:8|32|64)?|u?char|half|float|double|bfloat16|f8\w+|fp8\w*"
_LINES: dict[str, str] = {
    "name": r"Collective test starting:\s*(\S+)",
    "concluded": r"Collective test concluded:\s*(\S+)",
    "setup": r"\bnThread \d+ nGpus \d+",
    "rank": r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\b",
    "header": r"\bsize\s+count\s+type\b.*\bbusbw\b.*",
    "end": r"Out of bounds values\s*:\s*\d+\s+(\w+)",
    "row": rf"(?<![\w.])(\d+)\s+(\d+)\s+(?:{_TYPES})\s+(\S.*)",
}


def _recognised(line: str) -> tuple[str, re.Match[str] | None]:
    found = ((kind, match) for kind, pattern in _LINES.items() if (match := re.search(pattern, line)))
    return next(found, ("", None))


def _collective(program: str) -> str:
    """Return the collective that a program runs: ``all_reduce`` for ``./build/all_reduce_perf_mpi``."""
    return re.sub(r"_perf.*", "", program.replace("\\", "/").rpartition("/")[2])


def _row(where: str, match: re.Match[str], columns: Sequence[str]) -> Row:
    words = match[3].split()
    told = [(name.lstrip("#"), word) for name, word in zip(columns[3:], words, strict=False)]
    values = dict(told)  # of columns with the same name the last counts: its collectives are in place, as in training
    root, us = values.get("root", "-1"), values.get("time", "")
    is_whole = len(told) == len(columns) - 3 and _number(us) > 0 and root.lstrip("-").isdecimal()
    return Row(
        where=where,
        nbytes=int(match[1]),
        us=us if is_whole else "",
        rates=(values.get("algbw", ""), values.get("busbw", "")),
        redop=values.get("redop", ""),
        root=root,
        wrong=tuple(word for name, word in told if name == "wrong" or (word == _UNCHECKED and name == "error")),
    )


def _of_nccl_json(text: str) -> Iterator[Run]:
    """Yield the run in the JSON that nccl-tests writes with ``-J FILE``."""
    if not text.lstrip().startswith("{"):
        return
    try:
        data = json.loads(text)
        results, config = data.get("results"), data.get("config", {})
        if not isinstance(results, list) or not all("redop" in result for result in results):
            return
        devices = config.get("devices", [])
        yield Run(
            name=_collective(data["args"][0]) if data.get("args") else None,
            num_ranks=len(devices) * config.get("nthreads", 1) * config.get("ngpus", 1),
            groups={device.get("group", 0) for device in devices},
            rows=[_of_result(f"result {number}", result) for number, result in enumerate(results, 1)],
        )
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return


def _of_result(where: str, result: dict[str, Any]) -> Row:
    bodies = [body for name in ("out_of_place", "in_place") if (body := result.get(name))]
    own = bodies[-1] if bodies else {}
    has_rates = "alg_bw" in own and "bus_bw" in own
    return Row(
        where=where,
        nbytes=int(result["size"]),
        us=str(own["time"]) if _number(str(own.get("time"))) > 0 else "",
        rates=(str(own["alg_bw"]), str(own["bus_bw"])) if has_rates else None,
        redop=result["redop"],
        root=str(result.get("root", "-1")).strip(),
        wrong=tuple(_UNCHECKED if (one := body["nwrong"]) is None else str(one) for body in bodies if "nwrong" in body),
    )


_WORD = r"(?:[\d.]+|Pass|Fail)"


def _of_osu(text: str) -> Iterator[Run]:
    """Yield the runs in the output of ``osu_allreduce`` and similar: a title, a header, and rows with times."""
    run, columns = Run(name="a benchmark without a title"), 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"OSU (?:.* )?(\w+) (?:Latency|Bandwidth)\b.*Test", line):
            yield run
            name = match[1].lower()
            run, columns = Run(name=NAME if name == "allreduce" else name), 0
        elif match := re.search(r"\bSize\s+Avg Latency\(us\).*", line):
            columns = len(re.split(r"\s{2,}", match[0].strip()))
        elif columns and (match := re.search(rf"(?<![\w.])(\d+)((?:\s+{_WORD}){{{columns - 1}}})\s*$", line)):
            words = match[2].split()
            wrong = tuple("1" for word in words if word == "Fail")
            run.rows.append(Row(f"line {number}", int(match[1]), words[0], redop="sum", wrong=wrong))
    yield run


READERS: tuple[Callable[[str], Iterator[Run]], ...] = (_of_nccl_json, _of_nccl_tests, _of_osu)
"""Readers of all formats, in the order in which they are tried."""
