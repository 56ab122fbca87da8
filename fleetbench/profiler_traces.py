"""Traces of torch.profiler: when each rank computed and communicated, and for how long.

``read_traces`` returns the times, ``read_profiler`` their sums per step. A device may lag its host by whole
steps, so a kernel belongs to the step during which the host *launched* it: a kernel and its launch
(``cudaLaunchKernel``, ``hipLaunchKernel``, ``cudaGraphLaunch``, ...) share one ``args.correlation``. Kernels
before the first launched one were launched before the trace began; other kernels without a launch are left
out, with a note. In a trace without kernels, operators count, in the step that runs them.

Time in which two kernels run at once counts once. A kernel or operator is communication if its name says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
_RANK = re.compile(r"rank[-_. =]?(\d+)", re.IGNORECASE)
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_OPERATORS = ("cpu_op", "operator")
_NOT_LAUNCHES = (*_COPIES, "gpu_user_annotation", "cuda_sync", "user_annotation")
_RANGE = re.compile(r"enumerate\(DataLoader\)#.*__next__|Optimizer\.step#")
_WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy|hipMemcpyWithStream|aten::(item|_local_scalar_dense|is_nonzero|nonzero)"
)
"""Pattern of calls in which the host waits for the device."""
_HINT = "record CPU and CUDA activities with torch.profiler.profile, and call profiler.step() after each training step"
_LOST = 0.01
"""Largest share of a trace's kernel time that may be left out without a note."""
TRACES = (".json", ".json.gz")
"""Endings of the names of trace files."""
MOST_BYTES = 2**31
"""Largest size of a trace in bytes, decompressed. Larger traces are refused."""


class Call(NamedTuple):
    """A call by a thread of the host, or a copy on the device."""

    begin: int
    """Start in ns."""
    end: int
    """End in ns."""
    name: str
    thread: str
    kind: str
    """``operator``, ``python`` for a Python function such as ``train.py(12): main``, ``runtime``, ``copy`` or ``range``."""
    waits: bool
    """Whether the host waits for the device in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Content of one trace file. Arrays have one entry per kernel, or per operator in a trace without kernels."""

    rank: int
    world_size: int | None
    """Number of ranks in the job according to the trace, or None."""
    has_kernels: bool
    windows: dict[int, tuple[int, int]]
    """Start and end of each step on the host in ns, by step number, ordered by time."""
    begin: Integers
    """Start in ns."""
    end: Integers
    """End in ns."""
    launched: Integers
    """Time in ns at which the host launched the kernel, -1 if before the trace; ``begin`` for an operator."""
    at: Integers
    """Index of the step in ``windows``; -1 if launched outside of all steps."""
    communicates: Flags
    """Whether the kernel or operator is communication."""
    names: tuple[str, ...]
    """Name of each kernel or operator. For a collective it is the collective's name, such as ``allreduce``, if the
    trace has it."""
    group_sizes: Integers
    """Number of ranks that take part in the collective; 0 if unknown."""
    calls: tuple[Call, ...]
    notes: tuple[str, ...]

    def steps(self) -> dict[int, tuple[int, int]]:
        """Return nanoseconds of compute and of communication in each step, by step number."""

        def busy(which: Flags) -> int:
            begin, end = union((self.begin[which], self.end[which]))
            return int((end - begin).sum())

        return {
            step: (busy((self.at == index) & ~self.communicates), busy((self.at == index) & self.communicates))
            for index, step in enumerate(self.windows)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Traces of one job."""

    traces: tuple[Trace, ...]
    ranks: tuple[int, ...]
    """Numbers of the ranks, in order."""
    steps: tuple[int, ...]
    """Numbers of the steps in which each rank computes, in order."""
    times: dict[tuple[int, int], tuple[int, int]]
    """Nanoseconds of compute and of communication by rank and step."""
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
    numbers, whole = recorded.ranks, recorded.steps
    rows = [(place, step, *(ns * 1e-9 for ns in recorded.times[rank, step])) for place, rank in enumerate(numbers) for step in whole]
    table = pd.DataFrame(rows, columns=["rank", "step", "compute_s", "communication_s"])
    work = "kernels by the step of their launch" if recorded.traces[0].has_kernels else "operators of the host, for lack of kernels"
    size = f"{counted(len(whole), 'step')} ({whole[0]} to {whole[-1]}) of {counted(len(numbers), 'rank')}"
    spent = " and ".join(f"{table[f'{name}_s'].median() * 1e3:.4g} ms of {name}" for name in ("compute", "communication"))
    others = () if numbers == tuple(range(len(numbers))) else (f"ranks {', '.join(map(str, numbers))} of the job are counted from 0 here",)
    return table, (f"traces of torch.profiler: {size}; {work}: {spent} per step (median)", *others, *recorded.notes)


def read_traces(sources: Sequence[Path], where: str) -> Recorded:
    """Return the traces in ``sources``, as for ``read_profiler``, and the steps in which each rank computes.

    Raises ``ConfigError`` if ranks or steps cannot be determined.
    """
    paths = _files(sources, where)
    traces = [_read(path, where, is_alone=len(paths) == 1) for path in paths]
    if len({trace.has_kernels for trace in traces}) > 1:
        raise ConfigError("hold kernels in some files only", where, ", ".join(path.name for path in paths[:4]), _HINT)
    times: dict[tuple[int, int], tuple[int, int]] = {}
    for path, trace in zip(paths, traces, strict=True):
        spent = {(trace.rank, step): both for step, both in trace.steps().items()}
        if twice := times.keys() & spent.keys():
            hint = "name the traces of one run, in which a rank has each step once"
            raise ConfigError(f"is the second trace that has step {min(twice)[1]} of rank {trace.rank}", where, str(path), hint)
        times |= spent
    ranks, steps = (tuple(sorted({key[part] for key in times})) for part in (0, 1))
    whole = tuple(step for step in steps if all(times.get((rank, step), (0, 0))[0] > 0 for rank in ranks))
    if not whole:
        held = f"steps {steps[0]} to {steps[-1]} of {counted(len(ranks), 'rank')}"
        raise ConfigError("no step has compute on each rank", f"{where}: {paths[0]}", held, _HINT)
    notes = [note for trace in traces for note in trace.notes]
    if left := len(steps) - len(whole):
        notes.append(f"{left} of {len(steps)} steps are left out: a rank lacks them, or computes nothing in them")
    if len(ranks) > 1 and not any(communication for _, communication in times.values()):
        notes.append("no name is one of communication (nccl, rccl, gloo, ...), so all counts as compute")
    return Recorded(traces=tuple(traces), ranks=ranks, steps=whole, times=times, notes=tuple(dict.fromkeys(notes)))


def _files(sources: Sequence[Path], where: str) -> list[Path]:
    """Return the files in ``sources``, and the traces below its folders."""
    found: list[Path] = []
    for source in sources:
        traces = sorted(path for path in source.rglob("*") if path.name.endswith(TRACES)) if source.is_dir() else [source]
        found += traces
        if not traces:
            hint = "a run's folder has a manifest.json; traces of torch.profiler are files *.json and *.json.gz"
            raise ConfigError("is no run folder, and has no trace of torch.profiler", where, str(source), hint)
    return found


@dataclass(slots=True)
class _Events:
    """Events of a trace, collected while its JSON is parsed. Of an event, only times in ns and names are kept."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, end and number of each step on the host."""
    launches: dict[Any, int] = field(default_factory=dict)
    """Start of each launch, by its ``args.correlation``."""
    work: list[tuple[int, int, str, Any, str, int]] = field(default_factory=list)
    """Start, end, name and correlation of each kernel; name and number of ranks of its collective, if known."""
    operators: list[tuple[int, int, str, Any, str, int]] = field(default_factory=list)
    """Start, end and name of each operator, as in ``work``."""
    calls: list[Call] = field(default_factory=list)

    def keep(self, table: dict[str, Any]) -> Any:
        """Collect an event and return None in its place; an ``object_hook`` of ``json.loads``."""
        if "ph" not in table:
            return table
        if table["ph"] == "X" and "ts" in table:
            begin, took = (int(Decimal(table.get(name) or 0) * 1000) for name in ("ts", "dur"))
            arguments = table.get("args")
            self._add(
                str(table.get("name") or ""),
                str(table.get("cat") or "").lower(),
                (begin, begin + took),
                f"{table.get('pid')} {table.get('tid')}",
                arguments if isinstance(arguments, dict) else {},
            )
        return None

    def _add(self, name: str, kind: str, times: tuple[int, int], thread: str, arguments: dict[str, Any]) -> None:
        correlation, size = arguments.get("correlation"), arguments.get("Group size")
        is_operator, is_annotation = kind in _OPERATORS, kind == "user_annotation"
        if (step := _STEP.match(name)) is not None:
            if kind != "gpu_user_annotation":  # which is the step's place on the device
                self.steps.append((*times, int(step[1])))
            return
        if kind == "kernel":
            collective = str(arguments.get("Collective name") or "")
            self.work.append((*times, name, correlation, collective, size if isinstance(size, int) else 0))
        elif is_operator or (is_annotation and COMMUNICATION.search(name)):
            self.operators.append((*times, name, None, "", 0))
        elif kind not in _NOT_LAUNCHES and correlation is not None:
            self.launches[correlation] = times[0]
        waits, is_range = _WAITS.fullmatch(name) is not None, is_annotation and _RANGE.match(name) is not None
        kinds = {"operator": is_operator, "python": kind == "python_function", "copy": kind in _COPIES, "range": is_range, "runtime": waits}
        if called := next((one for one, is_so in kinds.items() if is_so), None):
            self.calls.append(Call(*times, name, thread, called, waits))


def _read(path: Path, where: str, *, is_alone: bool) -> Trace:
    """Read a trace.

    Raises ``ConfigError`` for a file that is no trace, or if its rank or the steps of kernels are unknown.
    """
    events, place = _Events(), f"{where}: {path}"
    raw = read_file(path, _HINT, place, MOST_BYTES)
    with reading(place, _HINT):
        data = json.loads(raw, object_hook=events.keep, parse_float=Decimal)
    data = data if isinstance(data, dict) else {}
    held = _refuse(events, place)
    begins, ends, numbers = np.array(sorted(events.steps), dtype=np.int64).T
    if (begins[1:] < ends[:-1]).any() or len(set(numbers)) < len(numbers):
        raise ConfigError("holds steps that overlap, or one twice", place, counted(len(numbers), "ProfilerStep"), _HINT)
    information = data.get("distributedInfo")
    rank, world = (information.get(name) if isinstance(information, dict) else None for name in ("rank", "world_size"))
    if rank is None and (named := _RANK.search(path.name)):
        rank = int(named[1])
    if rank is None and not is_alone:
        raise ConfigError("says no rank", place, hint="put the rank into the file's name, as in rank3.pt.trace.json")
    work, notes = events.work or events.operators, list[str]()
    begin, end = np.array([item[:2] for item in work], dtype=np.int64).T
    launched = begin
    if events.work:
        launched = np.array([events.launches.get(item[3], -1) for item in work])
        if launched.max() < 0:
            raise ConfigError("has no launches of its kernels, which say of which step they are", place, held, _HINT)
        known = (launched >= 0) | (begin < begin[launched >= 0].min())
        if (lost := int((end - begin)[~known].sum())) > _LOST * int((end - begin).sum()):
            notes.append(f"kernels of {lost * 1e-6:.4g} ms have no launch in {path.name}, and are left out")
        begin, end, launched = begin[known], end[known], launched[known]
        work = [item for item, is_known in zip(work, known, strict=True) if is_known]
    elif data.get("deviceProperties") or any("nccl" in item[2] for item in work):
        notes.append("the machine has GPUs, and no kernels were recorded: what they compute is not in these times")
    at = np.searchsorted(begins, launched, side="right") - 1
    return Trace(
        rank=rank or 0,
        world_size=world if isinstance(world, int) else None,
        has_kernels=bool(events.work),
        windows={int(number): (int(first), int(last)) for first, last, number in zip(begins, ends, numbers, strict=True)},
        begin=begin,
        end=end,
        launched=launched,
        at=np.where((at >= 0) & (launched < ends[at]), at, -1),
        communicates=matches([item[2] for item in work], COMMUNICATION),
        names=tuple(item[4] or item[2] for item in work),
        group_sizes=np.array([item[5] for item in work], dtype=np.int64),
        calls=tuple(events.calls),
        notes=tuple(notes),
    )


def _refuse(events: _Events, place: str) -> str:
    """Return what a trace holds, in words; raise ``ConfigError`` for a file that is no trace, or lacks steps or work."""
    held = f"{counted(len(events.work), 'kernel')}, {counted(len(events.operators), 'operator')}"
    if not (events.steps or events.work or events.operators or events.calls):
        raise ConfigError("is JSON, but no trace of torch.profiler", place, "no event of it", _HINT)
    if not events.steps:
        raise ConfigError("has no ProfilerStep, which says where a step of training begins", place, held, _HINT)
    if not events.work and (events.launches or not events.operators):
        raise ConfigError("has no kernels of CUDA or ROCm, and no operators without them", place, held, _HINT)
    return held


def matches(names: Sequence[str], pattern: re.Pattern[str]) -> Flags:
    """Return for each name whether the pattern is found in it."""
    known = {name: pattern.search(name) is not None for name in set(names)}
    return np.array([known[name] for name in names], dtype=bool)
