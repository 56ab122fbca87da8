"""Shares of a step from traces of torch.profiler, of one rank or of several.

A device lags its host. So a step lasts, on the device, from the end of what was launched before it to the end
of its own last kernel; if the device finishes before the host's step ends, it lasts until then. In that time,
the first that applies counts: compute (``optimizer`` if it was launched in ``Optimizer.step``, else
``device``), communication (``buffers`` if broadcast, ``collective`` if gathered or sent, else ``gradients``),
copies (``device``), a host inside a DataLoader (``input``), and ``idle``. Without kernels the host's time
counts: DataLoader, ``Optimizer.step``, operators, communication, and the rest (``loop``).

Hosts' clocks differ, but a collective ends on all ranks at about the same time. So clocks are aligned by the
median difference between the ends of corresponding collectives; waits then follow as in ``steps``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fleetbench.errors import ConfigError
from fleetbench.profiler_traces import Call, Trace, matches, read_traces
from fleetbench.quantities import counted
from fleetbench.spans import Spans, inside, lengths, union, within, without
from fleetbench.stragglers import Integers
from fleetbench.why.idle import HostWait, host_waits
from fleetbench.why.shares import EXCHANGES, Kind, Share, Shares
from fleetbench.why.steps import Meeting, RankStep, divided, meet

_BROADCAST = re.compile(r"broadcast", re.IGNORECASE)
_OTHERS = re.compile(r"all_?gather|all_?to_?all|send|recv|barrier", re.IGNORECASE)
"""Pattern in the names of communication that is unlikely to carry gradients or buffers."""
_UNALIGNED = re.compile(r"send|recv|c10d::", re.IGNORECASE)
"""Pattern in the names of communication between some ranks only, and of operators that only launch
communication."""
_EXCHANGES: tuple[Kind, ...] = ("gradients", "buffers", "collective")
_SCATTER = 0.1
"""Largest median difference between the ends of corresponding collectives on aligned clocks, as a share of a
step, at which waits are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShares:
    """Division of a step's time, and other results from traces."""

    shares: Shares
    """Shares of a step."""
    hidden_s: float
    """Seconds of communication per step that compute hides, mean over ranks and steps."""
    num_ranks: int
    """Number of ranks in the job; some of them may have no trace."""
    host_waits: tuple[HostWait, ...]
    """Waits of hosts for their devices, the longest ``idle_s`` first."""


def read_shares(sources: Sequence[Path], where: str) -> TraceShares:
    """Return the shares of a step from traces in ``sources``: files, plain or gzip, or folders of them.

    ``where`` is the argument's name in errors. Raises ``ConfigError`` for files that are no traces, and for
    traces whose steps cannot be determined.
    """
    recorded = read_traces(sources, where)
    parts = [_divide(trace, recorded.steps) for trace in recorded.traces]
    steps = [[RankStep() for _ in recorded.ranks] for _ in recorded.steps]
    for part in parts:
        for number, row in enumerate(steps):
            part.fill(row[recorded.ranks.index(part.trace.rank)], number)
    num, notes = len(steps) * len(recorded.ranks), list(recorded.notes)
    step_s = sum(int((part.windows[1] - part.windows[0]).sum()) for part in parts) * 1e-9 / num
    if len(recorded.ranks) > 1 and (cannot := _align(steps, step_s)):
        notes.append(f"which rank is waited for cannot be told: {cannot}")
    for row in steps:
        meet(row)
    shares = divided(steps, step_s, recorded.ranks)
    num_ranks = max(len(recorded.ranks), *(part.trace.world_size or 1 for part in parts))
    if len(recorded.ranks) < num_ranks and shares.of(*EXCHANGES):
        of = f"{counted(len(recorded.ranks), 'rank')} of {num_ranks}"
        notes.append(f"the traces are of {of}: communication includes waits for the others; their traces tell these")
    devices = [(part.trace, part.spans["idle"], part.spans["input"]) for part in parts if part.trace.has_kernels]
    return TraceShares(
        shares=replace(shares, notes=tuple(notes)),
        hidden_s=sum(part.hidden_ns for part in parts) * 1e-9 / num,
        num_ranks=num_ranks,
        host_waits=host_waits(devices, num),
    )


def projected(found: TraceShares, *, link_factor: float | None, ranks: int | None) -> Shares:
    """Return an upper bound of the step with links ``link_factor`` times as fast and ``ranks`` ranks.

    None leaves links, or the number of ranks, as they are.

    A ring all-reduce of S bytes among n ranks moves 2 (n - 1) / n S over each link. So communication takes f =
    (n' - 1) n / (n' (n - 1)) / ``link_factor`` times as long; latency is neglected. Let a queue of buckets
    send bucket i, ready at r_i, in c_i, and let the backward end at B >= r_i. Then E = max_i (r_i - B + c_i +
    c_(i+1) + ...) is exposed. So for f <= 1 at most f E stays exposed, and for f > 1 at most E + (f - 1) T,
    where T is all communication, hidden or not. Waits for slow ranks stay as they are. Waits that traces do
    not show count as communication, and then the result is no bound for f < 1.

    Raises ``ConfigError`` for ``ranks`` if the job has one rank.
    """
    if ranks is not None and found.num_ranks < 2:
        hint = "name the traces of several ranks"
        raise ConfigError("cannot be projected from one rank, without all-reduces", "ranks", str(ranks), hint)
    factor = 1.0 / (link_factor or 1.0)
    if ranks is not None:
        factor *= (ranks - 1) * found.num_ranks / (ranks * (found.num_ranks - 1))
    exposed_s = found.shares.of(*EXCHANGES)
    more_s = (factor - 1.0) * (exposed_s + (found.hidden_s if factor > 1.0 else 0.0))
    shares = found.shares.shares if exposed_s else (*found.shares.shares, Share(kind="gradients", seconds=0.0))
    parts = [share for share in shares if share.kind in EXCHANGES and share.rank is None]
    changed = tuple(
        replace(share, seconds=share.seconds + more_s * (share.seconds / exposed_s if exposed_s else 1 / len(parts)))
        if share in parts
        else share
        for share in shares
    )
    is_bound = factor >= 1.0 or found.shares.num_ranks == found.num_ranks
    note = f"{'an upper bound' if is_bound else 'an estimate'}: communication takes {factor:.3g} times as long"
    note += ", by a ring's volume and without latency; waits for ranks stay as they are"
    note += "" if is_bound else ", but those for ranks without traces shrink like communication"
    return replace(found.shares, step_s=sum(share.seconds for share in changed), shares=changed, notes=(*found.shares.notes, note))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """One trace, divided by kinds of activity.

    Arrays have one entry per step of the job, which is 0 if another file has the step.
    """

    trace: Trace
    windows: Spans
    """Steps on the device."""
    spans: dict[Kind, Spans]
    """Times of each kind of activity. They do not overlap, and together they fill the windows."""
    ns: dict[Kind, Integers]
    hidden_ns: int
    """Nanoseconds of communication that compute hides."""
    met: dict[int, list[Meeting]]
    """Collectives among all ranks, by index of the step, ordered by start."""

    def fill(self, step: RankStep, number: int) -> None:
        """Add the activities of this trace in the step of index ``number``."""
        step.meetings += self.met[number]
        for kind, each in self.ns.items():
            if kind in EXCHANGES:
                step.exposed[kind] += max(0, int(each[number]) - sum(one.bare_ns for one in self.met[number] if one.kind == kind))
            else:
                step.own[kind] += int(each[number])
        for meeting in self.met[number]:
            meeting.since = dict(step.own)


def _divide(trace: Trace, steps: Sequence[int]) -> _Parts:
    """Divide the steps of a trace that are among ``steps``."""
    windows = _windows(trace, steps)
    ranges = [call for call in trace.calls if call.kind == "range"]
    update = _times(call for call in ranges if call.name.startswith("Optimizer"))
    loader = _times(call for call in ranges if not call.name.startswith("Optimizer"))
    copies = _times(call for call in trace.calls if call.kind == "copy")
    broadcasts, others = (trace.communicates & matches(trace.names, which) for which in (_BROADCAST, _OTHERS))
    updates = ~trace.communicates & inside(trace.launched, update)
    chosen = (~trace.communicates, ~trace.communicates & ~updates, trace.communicates & ~broadcasts & ~others, broadcasts, others)
    compute, bare, *each = (union((trace.begin[which], trace.end[which])) for which in chosen)
    exchanged: list[tuple[Kind, Spans]] = list(zip(_EXCHANGES, each, strict=True))
    layers: list[tuple[Kind, Spans]]
    if trace.has_kernels:
        layers = [("device", bare), ("optimizer", compute), *exchanged, ("device", copies), ("input", loader), ("idle", windows)]
    else:
        layers = [("input", loader), ("optimizer", update), ("device", compute), *exchanged, ("loop", windows)]
    spans, taken = dict[Kind, Spans](), union()
    for kind, layer in layers:
        spans[kind] = union(spans.get(kind, union()), within(without(layer, taken), windows))
        taken = union(taken, layer)
    exposed = union(*(spans[kind] for kind in _EXCHANGES))
    hidden_ns = int((lengths(union(*each), windows) - lengths(exposed, windows)).sum())
    is_whole = (trace.group_sizes == 0) | (trace.group_sizes == trace.world_size) | (trace.world_size is None)
    aligned = trace.communicates & ~matches(trace.names, _UNALIGNED) & is_whole
    places = {step: place for place, step in enumerate(trace.windows)}
    met = dict[int, list[Meeting]]()
    for number, step in enumerate(steps):
        which = np.flatnonzero(aligned & (trace.at == places.get(step, -2)))
        which = which[np.argsort(trace.begin[which], kind="stable")]
        begins, ends = trace.begin[which], trace.end[which]
        firsts = np.minimum(np.maximum.accumulate(np.concatenate([[0], ends]))[:-1].clip(begins), ends)  # no time counts twice
        bare_ns = lengths(exposed, (firsts, ends))
        kinds = np.where(broadcasts[which], "buffers", np.where(others[which], "collective", "gradients"))
        met[number] = [
            Meeting(kind, int(begin), int(end), {}, 0, int(ns), trace.names[index])
            for index, kind, begin, end, ns in zip(which, kinds.tolist(), begins, ends, bare_ns, strict=True)
        ]
    return _Parts(
        trace=trace,
        windows=windows,
        spans=spans,
        ns={kind: lengths(own, windows) for kind, own in spans.items()},
        hidden_ns=hidden_ns,
        met=met,
    )


def _windows(trace: Trace, steps: Sequence[int]) -> Spans:
    """Return start and end of each step on the device; 0 for steps that the trace lacks."""
    begins, ends = np.zeros((2, len(steps)), dtype=np.int64)
    place_of = {step: place for place, step in enumerate(trace.windows)}
    for index, step in enumerate(steps):
        if (place := place_of.get(step)) is None:
            continue
        first, last = trace.windows[step]
        if trace.has_kernels:
            first = max(first, int(trace.end[trace.launched < first].max(initial=0)))
            last = max(first, last, int(trace.end[trace.at == place].max(initial=0)))
        begins[index], ends[index] = first, last
    return begins, ends


def _align(steps: Sequence[Sequence[RankStep]], step_s: float) -> str:
    """Put the meetings of all ranks on rank 0's clock; return why it cannot be done, and then forget them."""
    alike = [row for row in steps if len({tuple(one.name for one in rank.meetings) for rank in row}) == 1]
    ends = np.array([[one.end_ns for row in alike for one in row[rank].meetings if one.kind != "buffers"] for rank in range(len(steps[0]))])
    why = "" if ends.size else "no collective waits for all ranks"
    if ends.size:
        ahead = np.median(ends - ends[0], axis=1).astype(np.int64)
        scatter_ns = float(np.median(np.ptp(ends - ahead[:, None], axis=0)))
        for row in steps:
            for rank, lead in zip(row, ahead, strict=True):
                for one in rank.meetings:
                    one.start_ns, one.end_ns = one.start_ns - int(lead), one.end_ns - int(lead)
        if scatter_ns > _SCATTER * step_s * 1e9:
            why = f"collectives of one index do not end together, but {scatter_ns * 1e-6:.3g} ms apart in median"
    for rank in (rank for row in steps for rank in row) if why else ():
        for one in rank.meetings:
            rank.exposed[one.kind] += one.bare_ns
        rank.meetings.clear()
    return why


def _times(calls: Iterable[Call]) -> Spans:
    """Return the times in which at least one of the calls is running."""
    times = np.array([call[:2] for call in calls], dtype=np.int64).reshape(-1, 2)
    return union((times[:, 0], times[:, 1]))
