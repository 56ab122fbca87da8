"""Traces of torch.profiler: when each rank computed and communicated, and for how long.

``read_traces`` returns the times, ``read_profiler`` their sums per step. A device may lag its host by whole
steps, so a kernel belongs to the step during which the host *launched* it: a kernel and its launch
(``cudaLaunchKernel``, ``hipLaunchKernel``, ``cudaGraphLaunch``, ...) share one ``args.correlation``. Kernels
before the first launched one on their stream were launched before the trace began; other kernels without a
launch are left out, with a note. In a trace without kernels, operators count, in the step that runs them.

Time in which two kernels run at once counts once. A kernel or operator is communication if its name says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fleetbench.digests import read_file, reading
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted
from fleetbench.spans import union
from fleetbench.stragglers import Integers

if TYPE_CHECKING:
    import pandas as pd

Flags = npt.NDArray[np.bool_]
COMMUNICATION = re.compile(
    r"nccl|rccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|nvshmem", re.IGNORECASE
)
"""Pattern that the names of communicating kernels and operators contain."""
_UNNAMED = re.compile(r"\W*(unknown|unnamed|none|null)?[\W\d_]*", re.IGNORECASE)
"""Pattern of names that do not say what a kernel does."""
_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
_RANK = re.compile(r"rank[-_. =]?(\d+)", re.IGNORECASE)
_WORKER = re.compile(r"(\.\d{6,})?(\.pt)?(\.trace)?\.json(\.\w+)?$")
"""Pattern of the suffix after the worker's name in a file name. ``tensorboard_trace_handler`` adds a time for each
profiling cycle."""
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_ON_DEVICE = (*_COPIES, "gpu_user_annotation", "cuda_sync")
_RANGE = re.compile(r"enumerate\(DataLoader\)#.*__next__|Optimizer\.step#")
_WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy|hipMemcpyWithStream|aten::(item|_local_scalar_dense|is_nonzero|nonzero)"
)
"""Pattern of calls in which the host waits for the device."""
_HINT = "record CPU and CUDA activities with torch.profiler.profile, and call profiler.step() after each training step"
_LOST = 0.01
"""Largest share of a trace's kernel time that may be unnamed, or be left out without a note."""
TRACES = (".json", ".json.gz")
"""Endings of the names of trace files."""
MOST_BYTES = 2**31
"""Largest size of a trace in bytes, decompressed. Larger traces are refused."""
OUTSIDE, NEVER = -1, -2
"""Values in place of a step's index: launched outside of all steps, or not in this trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Kernels, or operators in a trace without kernels. Arrays have one entry per kernel or operator."""

    begin: Integers
    """Start in ns."""
    end: Integers
    """End in ns."""
    launched: Integers
    """Time in ns at which the host launched the kernel, -1 if unknown; ``begin`` for an operator."""
    at: Integers
    """Index of the step in ``Trace.windows``, or ``OUTSIDE`` or ``NEVER``."""
    communicates: Flags
    """Whether the kernel or operator is communication."""
    names: tuple[str, ...]
    """Name of each kernel or operator. For a collective it is the collective's name, such as ``allreduce``, if the
    trace has it."""
    group_sizes: Integers
    """Number of ranks that take part in the collective; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call by a thread of the host, or a copy on the device."""

    begin: int
    """Start in ns."""
    end: int
    """End in ns."""
    name: str
    thread: str
    is_python: bool = False
    """Whether this is a Python function, such as ``train.py(12): main``, and not an operator, range or runtime
    call."""


@dataclass(slots=True)
class Host:
    """Calls of the host, and copies on the device. Empty unless ``read_traces`` was called with ``host``."""

    copies: list[Call] = field(default_factory=list)
    """Copies and fills on the device; their ``thread`` has no meaning."""
    ranges: list[Call] = field(default_factory=list)
    """Ranges named ``enumerate(DataLoader)#...__next__`` or ``Optimizer.step#...``."""
    waits: list[Call] = field(default_factory=list)
    """Calls in which the host waits for the device."""
    calls: list[Call] = field(default_factory=list)
    """Operators, and Python functions if the profiler recorded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Content of one trace file."""

    path: Path
    rank: int | None
    """Rank according to the trace, or None; in ``Recorded``, always known."""
    world_size: int | None
    """Number of ranks in the job according to the trace, or None."""
    has_kernels: bool
    windows: dict[int, tuple[int, int]]
    """Start and end of each step on the host in ns, by step number, ordered by time."""
    work: Work
    host: Host
    steps: dict[int, tuple[int, int]]
    """Nanoseconds of compute and of communication in each step, by step number."""
    longest: tuple[str, ...]
    """Names of the kernels or operators that take the most time."""
    notes: tuple[str, ...]
    """Sentences about what was left out or guessed."""

    @property
    def worker(self) -> str:
        """Name of the process that wrote the trace, from the file name."""
        return _WORKER.sub("", self.path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Traces of one job."""

    traces: tuple[Trace, ...]
    ranks: tuple[int, ...]
    """Numbers of the ranks, in order."""
    steps: tuple[int, ...]
    """Numbers of the steps in which each rank computes, in order."""
    notes: tuple[str, ...]
    """Sentences about what was left out or could not be determined."""


def read_profiler(sources: Sequence[Path], where: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return a table of ``compute_s`` and ``communication_s`` with a row per rank and step, and notes.

    ``sources`` are files, one per rank or per profiling cycle of a rank, or folders of them. Ranks are
    renumbered from 0 without gaps. Steps that a rank lacks, or in which it computes nothing, are left out.
    Raises ``ConfigError`` if ranks or steps cannot be determined.
    """
    import pandas as pd

    recorded = read_traces(sources, where)
    traces, numbers, whole, notes = recorded.traces, recorded.ranks, recorded.steps, [*recorded.notes]
    if numbers != tuple(range(len(numbers))):
        of = ", ".join(f"rank {rank} of the job is rank {place} here" for place, rank in enumerate(numbers[:8]))
        notes.append(f"ranks are counted from 0: {of}{', ...' if len(numbers) > 8 else ''}")
    times = {(trace.rank, step): spent for trace in traces for step, spent in trace.steps.items()}
    rows = [(place, step, *(ns * 1e-9 for ns in times[rank, step])) for place, rank in enumerate(numbers) for step in whole]
    table = pd.DataFrame(rows, columns=["rank", "step", "compute_s", "communication_s"])
    work = "kernels by the step of their launch" if traces[0].has_kernels else "operators of the host, for lack of kernels"
    compute, communication = (_spread(table[name] * 1e3) for name in ("compute_s", "communication_s"))
    size = f"{counted(len(whole), 'step')} ({whole[0]} to {whole[-1]}) of {counted(len(numbers), 'rank')}"
    said = f"traces of torch.profiler: {size}; {work}: {compute} of compute a step, {communication} of communication"
    return table, (said, *notes)


def read_traces(sources: Sequence[Path], where: str, *, host: bool = False) -> Recorded:
    """Return the traces in ``sources``, as for ``read_profiler``, and the steps in which each rank computes.

    With ``host``, each ``Trace.host`` is filled. Raises ``ConfigError`` if ranks or steps cannot be determined.
    """
    traces = [_read(path, where, host=host) for path in _files(sources, where)]
    if other := next((trace for trace in traces if trace.has_kernels != traces[0].has_kernels), None):
        raise ConfigError(f"holds {'' if other.has_kernels else 'no '}kernels, unlike {traces[0].path.name}", where, str(other.path), _HINT)
    ranks, notes = _ranks(traces, where)
    times: dict[tuple[int, int], tuple[int, int]] = {}
    for trace, rank in zip(traces, ranks, strict=True):
        for step in trace.steps.keys() & {step for other, step in times if other == rank}:
            hint = "name the traces of one run, in which a rank has each step once"
            raise ConfigError(f"is the second trace that has step {step} of rank {rank}", where, str(trace.path), hint)
        times |= {(rank, step): spent for step, spent in trace.steps.items()}
    numbers, steps = sorted(set(ranks)), sorted({step for _, step in times})
    whole = [step for step in steps if all(times.get((rank, step), (0, 0))[0] > 0 for rank in numbers)]
    if not whole:
        what, held = "no step has compute on each rank", f"steps {steps[0]} to {steps[-1]} of {counted(len(numbers), 'rank')}"
        raise ConfigError(what, f"{where}: {traces[0].path}", held, _HINT)
    if left := len(steps) - len(whole):
        notes.append(f"{left} of {len(steps)} steps are left out: a rank lacks them, or computes nothing in them")
    if len(numbers) > 1 and not any(communication for _, communication in times.values()):
        names = ", ".join(traces[0].longest)
        notes.append(f"no name is one of communication (nccl, rccl, gloo, ...), so all counts as compute; most time take {names}")
    said = (note for trace in traces for note in trace.notes)
    return Recorded(
        traces=tuple(replace(trace, rank=rank) for trace, rank in zip(traces, ranks, strict=True)),
        ranks=tuple(numbers),
        steps=tuple(whole),
        notes=(*notes, *dict.fromkeys(said)),
    )


def _files(sources: Sequence[Path], where: str) -> list[Path]:
    """Return the files in ``sources``, and the traces below its folders."""
    found: list[Path] = []
    for source in sources:
        files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
        traces = [path for path in files if path == source or path.name.endswith(TRACES)]
        found += traces
        if not traces:
            held = f"{source}: {counted(len(files), 'file')}{f', such as {files[0].name}' if files else ''}"
            hint = "a run's folder has a manifest.json; traces of torch.profiler are files *.json and *.json.gz"
            raise ConfigError("is no run folder, and has no trace of torch.profiler", where, held, hint)
    return found


def _ranks(traces: Sequence[Trace], where: str) -> tuple[list[int], list[str]]:
    """Return the rank of each trace, and notes about the source of the ranks."""
    named = [_RANK.search(trace.path.name) for trace in traces]
    told = [int(name[1]) if trace.rank is None and name else trace.rank for trace, name in zip(traces, named, strict=True)]
    ranks = [rank for rank in told if rank is not None]
    if len(ranks) == len(traces):
        says = all(trace.rank is not None for trace in traces)
        return ranks, [] if says else ["ranks are those of the files' names, as a trace has no distributedInfo"]
    if ranks or len({trace.worker for trace in traces}) > 1:
        hint = "put the rank into the file's name, as in rank3.pt.trace.json"
        raise ConfigError("say no rank", where, ", ".join(trace.path.name for trace in traces[:4]), hint)
    return [0] * len(traces), []


def _spread(values: pd.Series[float]) -> str:
    low, middle, high = np.quantile(values, (0, 0.5, 1))
    return f"{middle:.4g} ms ({low:.4g} to {high:.4g})"


@dataclass(slots=True)
class _Events:
    """Events of a trace, collected while its JSON is parsed. Of an event, only times in ns and names are kept."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, end and number of each step on the host."""
    launches: dict[Any, int] = field(default_factory=dict)
    """Start of each launch, by its ``args.correlation``."""
    kernels: list[tuple[int, int, str, Any, Any]] = field(default_factory=list)
    """Start, end, name, correlation and stream of each kernel."""
    collectives: list[tuple[str, int]] = field(default_factory=list)
    """Name and number of ranks of each kernel's collective; empty and 0 if unknown."""
    operators: list[tuple[int, int, str]] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)
    """Number of annotations by name."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of the device's runtime by category."""
    host: Host | None = None
    """Calls and copies; None if they are not kept."""

    def keep(self, table: dict[str, Any]) -> Any:
        """Collect an event and return None in its place; an ``object_hook`` of ``json.loads``."""
        if "ph" not in table:
            return table
        if table["ph"] == "X" and "ts" in table:
            begin, took, arguments = _ns(table["ts"]), _ns(table.get("dur") or 0), table.get("args")
            correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
            self._add(str(table.get("name") or ""), str(table.get("cat") or "").lower(), begin, begin + took, correlation, table)
        return None

    def _add(self, name: str, kind: str, begin: int, end: int, correlation: Any, table: dict[str, Any]) -> None:
        if self.host is not None:
            self._add_host(self.host, name, kind, begin, end, table)
        if (step := _STEP.match(name)) is not None:
            if kind != "gpu_user_annotation":  # which is the step's place on the device
                self.steps.append((begin, end, int(step[1])))
        elif kind == "kernel":
            self.kernels.append((begin, end, name, correlation, (table.get("pid"), table.get("tid"))))
            arguments = table.get("args") or {}
            size = arguments.get("Group size")
            self.collectives.append((str(arguments.get("Collective name") or ""), size if isinstance(size, int) else 0))
        elif kind in ("cpu_op", "operator") or (kind == "user_annotation" and COMMUNICATION.search(name)):
            self.operators.append((begin, end, name))
        elif kind == "user_annotation":
            self.names[name] += 1
        elif kind not in _ON_DEVICE and correlation is not None:
            self.launches[correlation] = begin
            self.calls[kind] += 1

    def _add_host(self, host: Host, name: str, kind: str, begin: int, end: int, table: dict[str, Any]) -> None:
        is_python, is_operator = kind == "python_function", kind in ("cpu_op", "operator")
        is_range = _RANGE.match(name) is not None and kind != "gpu_user_annotation"
        is_wait = _WAITS.fullmatch(name) is not None
        if not (is_python or is_operator or is_range or is_wait or kind in _COPIES):
            return
        call = Call(begin, end, name, f"{table.get('pid')} {table.get('tid')}", is_python)
        if kind in _COPIES:
            host.copies.append(call)
        if is_range:
            host.ranges.append(call)
        if is_wait:
            host.waits.append(call)
        if is_python or is_operator:
            host.calls.append(call)


def _read(path: Path, where: str, *, host: bool) -> Trace:
    """Read a trace.

    Raises ``ConfigError`` for a file that is no trace, or if the steps of kernels are unknown.
    """
    events, place = _Events(host=Host() if host else None), f"{where}: {path}"
    raw = read_file(path, _HINT, place, MOST_BYTES)
    with reading(place, _HINT):
        data = json.loads(raw, object_hook=events.keep, parse_float=Decimal)
    data = data if isinstance(data, dict) else {}
    _refuse(events, place)
    begins, ends, numbers = np.array(sorted(events.steps), dtype=np.int64).T
    if (begins[1:] < ends[:-1]).any() or len(set(numbers)) < len(numbers):
        raise ConfigError("holds steps that overlap, or one twice", place, counted(len(numbers), "ProfilerStep"), _HINT)
    work = events.kernels or events.operators
    begin, end = np.array([item[:2] for item in work], dtype=np.int64).T
    notes = list[str]()
    at, launched = _step_of(begin, begins, ends), begin
    if events.kernels:
        at, launched = _launched(events, begins, ends, place)
    took = Counter[str]()
    for item, ns in zip(work, (end - begin) * (at >= 0), strict=True):
        took[str(item[2])] += int(ns)
    least = _LOST * took.total()
    if (unnamed := sum(ns for name, ns in took.items() if _UNNAMED.fullmatch(name))) > least:
        what, held = "holds kernels whose names do not say whether they compute or communicate", f"{unnamed * 1e-6:.4g} ms"
        raise ConfigError(what, place, f"{held} of {took.total() * 1e-6:.4g}", _HINT)
    if (lost := int((end - begin)[at == NEVER].sum())) > least:
        notes.append(f"kernels of {lost * 1e-6:.4g} ms have no launch in {path.name}, and are left out")
    if not events.kernels and (data.get("deviceProperties") or any("nccl" in item[2] for item in work)):
        notes.append("the machine has GPUs, and no kernels were recorded: what they compute is not in these times")
    information = data.get("distributedInfo")
    rank, size = (information.get(name) if isinstance(information, dict) else None for name in ("rank", "world_size"))
    communicates = matches([str(item[2]) for item in work], COMMUNICATION)
    collectives = events.collectives or [("", 0)] * len(work)
    parts = [[(at == index) & chosen for chosen in (~communicates, communicates)] for index in range(len(numbers))]
    return Trace(
        path=path,
        rank=rank if isinstance(rank, int) else None,
        world_size=size if isinstance(size, int) else None,
        has_kernels=bool(events.kernels),
        windows={int(number): (int(first), int(last)) for first, last, number in zip(begins, ends, numbers, strict=True)},
        work=Work(
            begin=begin,
            end=end,
            launched=launched,
            at=at,
            communicates=communicates,
            names=tuple(collective or str(item[2]) for item, (collective, _) in zip(work, collectives, strict=True)),
            group_sizes=np.array([size for _, size in collectives], dtype=np.int64),
        ),
        host=events.host or Host(),
        steps={int(number): (_busy(begin[c], end[c]), _busy(begin[m], end[m])) for number, (c, m) in zip(numbers, parts, strict=True)},
        longest=tuple(name for name, _ in took.most_common(3)),
        notes=tuple(notes),
    )


def _refuse(events: _Events, place: str) -> None:
    """Raise ``ConfigError`` for a file that is not a trace, or has no steps, or neither kernels nor operators."""
    names, calls = (", ".join(f"{num:,} x {name}" for name, num in found.most_common(4)) for found in (events.names, events.calls))
    held = f"{counted(len(events.kernels), 'kernel')}, {counted(len(events.operators), 'operator')}, annotations: {names or 'none'}"
    if not (events.steps or events.kernels or events.operators or names):
        raise ConfigError("is JSON, but no trace of torch.profiler", place, "no event of it", _HINT)
    if not events.steps:
        raise ConfigError("has no ProfilerStep, which says where a step of training begins", place, held, _HINT)
    if calls and not events.kernels:
        raise ConfigError("has calls of a device, but no kernels of CUDA or ROCm", place, calls, _HINT)
    if not events.kernels and not events.operators:
        raise ConfigError("has neither kernels nor operators", place, held, _HINT)


def _launched(events: _Events, begins: Integers, ends: Integers, place: str) -> tuple[Integers, Integers]:
    """Return the index in ``begins`` of each kernel's step, by the module's rules, and its launch time in ns."""
    launched = np.array([events.launches.get(kernel[3], -1) for kernel in events.kernels])
    if launched.max() < 0:
        raise ConfigError("has no launches of its kernels, which say of which step they are", place, f"{len(launched):,} kernels", _HINT)
    first = dict[Any, int]()
    for (begin, *_, stream), launch in zip(events.kernels, launched, strict=True):
        if launch >= 0:
            first[stream] = min(begin, first.get(stream, begin))
    is_earlier = np.array([begin < first.get(stream, 0) for begin, *_, stream in events.kernels])
    return np.where(launched >= 0, _step_of(launched, begins, ends), np.where(is_earlier, OUTSIDE, NEVER)), launched


def matches(names: Sequence[str], pattern: re.Pattern[str]) -> Flags:
    """Return for each name whether the pattern is found in it."""
    known = {name: pattern.search(name) is not None for name in set(names)}
    return np.array([known[name] for name in names], dtype=bool)


def _step_of(moments: Integers, begins: Integers, ends: Integers) -> Integers:
    """Return for each moment the index in ``begins`` of the step that contains it, or ``OUTSIDE``."""
    at = np.searchsorted(begins, moments, side="right") - 1
    return np.where((at >= 0) & (moments < ends[at]), at, OUTSIDE)


def _busy(begin: Integers, end: Integers) -> int:
    """Return the nanoseconds that the intervals cover together."""
    begin, end = union((begin, end))
    return int((end - begin).sum())


def _ns(microseconds: Any) -> int:
    return int(Decimal(microseconds) * 1000)
