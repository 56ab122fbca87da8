"""Shares of a step from traces of torch.profiler, of one rank or of several.

A device lags its host. So a step lasts, on the device, from the end of what was launched before it to the end
of its own last kernel; if the device finishes before the host's step ends, it lasts until then. In that time,
the first that applies counts: compute (``optimizer`` if it was launched in ``Optimizer.step``, else
``device``), communication (``buffers`` if broadcast, ``collective`` if gathered or sent, else ``gradients``),
copies (``device``), a host inside a DataLoader (``input``), and ``idle``. Without kernels the host's time
counts: DataLoader, ``Optimizer.step``, operators, communication, and the rest (``loop``).

**Waits for a rank.** Hosts' clocks differ, but a collective ends on all ranks at about the same time. So
clocks are aligned by the median difference between the ends of corresponding collectives. Until the last rank
begins a collective, the others wait for that rank, unless compute hides the wait. A rank that ends before the
last one begins, such as the root of a broadcast, does not wait.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fleetbench.errors import ConfigError
from fleetbench.profiler_traces import OUTSIDE, Call, Flags, Trace, matches, read_traces
from fleetbench.quantities import counted
from fleetbench.spans import Spans, inside, lengths, union, within, without
from fleetbench.stragglers import Floats, Integers
from fleetbench.why.idle import HostWait, Idle, idle_causes
from fleetbench.why.shares import EXCHANGES, Kind, Share, Shares
from fleetbench.why.steps import steady_rank_of

_BROADCAST = re.compile(r"broadcast", re.IGNORECASE)
_OTHERS = re.compile(r"all_?gather|all_?to_?all|send|recv|barrier", re.IGNORECASE)
"""Pattern in the names of communication that is unlikely to carry gradients or buffers."""
_UNALIGNED = re.compile(r"send|recv|c10d::", re.IGNORECASE)
"""Pattern in the names of communication between some ranks only, and of operators that only launch
communication."""
_CAUSES: tuple[Kind, ...] = ("input", "device", "optimizer", "idle", "loop")
"""Kinds of work of which a rank may do more than the ranks that wait for it."""
_EXCHANGES: tuple[Kind, ...] = ("gradients", "buffers", "collective")
_SAID = 0.02
"""Share of a step below which times are not mentioned in notes."""
_ABOUT = 0.1
"""Share of the longest wait up to which a rank's own wait shows that it began a collective about last."""
_SCATTER = 0.1
"""Limit of misalignment. Ranks are not aligned if collectives' ends differ in median by more than this share
of a step, beyond the clocks' difference, or if more than this share of all-reduces end on one rank before
they begin on another one."""


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


def shares_of_traces(sources: Sequence[Path], where: str) -> Shares:
    """Return the shares of a step from traces in ``sources``: files, plain or gzip, or folders of them.

    ``where`` is the argument's name in errors. Raises ``ConfigError`` for files that are no traces, and for
    traces whose steps cannot be determined.
    """
    return read_shares(sources, where).shares


def read_shares(sources: Sequence[Path], where: str) -> TraceShares:
    """Return the shares of a step from traces, and other results; see ``shares_of_traces``."""
    recorded = read_traces(sources, where, host=True)
    parts = [_divide(trace, recorded.steps) for trace in recorded.traces]
    notes = list(recorded.notes)
    waits = _waits(parts, recorded.ranks, recorded.steps, notes)
    shares = _shares(parts, waits, recorded.ranks, len(recorded.steps))
    num = len(recorded.steps) * len(recorded.ranks)
    devices = [part for part in parts if part.trace.has_kernels]
    idle = idle_causes([(part.trace, part.spans["idle"], part.spans["input"]) for part in devices], num)
    shares = replace(shares, notes=(*notes, *_notes(parts, idle, shares)))
    return TraceShares(
        shares=shares,
        hidden_s=sum(int(part.hidden.sum()) for part in parts) * 1e-9 / num,
        num_ranks=max(len(recorded.ranks), *(part.trace.world_size or 1 for part in parts)),
        host_waits=idle.host_waits,
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

    Raises ``ConfigError`` for numbers out of range, and for ``ranks`` if the job has one rank.
    """
    if (link_factor is not None and link_factor <= 0) or (ranks is not None and ranks < 2):
        value = f"{link_factor} and {ranks}"
        raise ConfigError("must be above 0, and ranks at least 2", "link_factor, ranks", value, "link_factor=2, ranks=16")
    if ranks is not None and found.num_ranks < 2:
        hint = "name the traces of several ranks"
        raise ConfigError("cannot be projected from one rank, without all-reduces", "ranks", str(ranks), hint)
    factor = 1.0 / (link_factor or 1.0)
    if ranks is not None:
        factor *= (ranks - 1) * found.num_ranks / (ranks * (found.num_ranks - 1))
    exposed_s = found.shares.of(*EXCHANGES)
    more = (factor - 1.0) * (exposed_s + found.hidden_s) if factor > 1.0 else (factor - 1.0) * exposed_s
    scale = 1.0 + more / exposed_s if exposed_s else 1.0
    changed = tuple(
        replace(share, seconds=share.seconds * scale) if share.kind in EXCHANGES and share.rank is None else share
        for share in found.shares.shares
    )
    if not exposed_s and more > 0:
        changed += (Share(kind="gradients", seconds=more),)
    step_s = sum(share.seconds for share in changed)
    is_bound = factor >= 1.0 or found.shares.num_ranks == found.num_ranks
    note = f"{'an upper bound' if is_bound else 'an estimate'}: communication takes {factor:.3g} times as long"
    note += ", by a ring's volume and without latency; waits for ranks stay as they are"
    note += "" if is_bound else ", but those for ranks without traces shrink like communication"
    return replace(found.shares, step_s=step_s, shares=changed, notes=(*found.shares.notes, note))


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
    hidden: Integers
    """Nanoseconds of communication that compute hides."""
    collectives: dict[int, tuple[tuple[str, ...], Spans]]
    """Collectives among all ranks, by step: their names, and their starts and ends ordered by start."""


def _divide(trace: Trace, steps: Sequence[int]) -> _Parts:
    """Divide the steps of a trace that are among ``steps``."""
    work, host, windows = trace.work, trace.host, _windows(trace, steps)
    update = _calls(call for call in host.ranges if call.name.startswith("Optimizer"))
    loader = _calls(call for call in host.ranges if not call.name.startswith("Optimizer"))
    broadcasts, others = (work.communicates & matches(work.names, which) for which in (_BROADCAST, _OTHERS))
    computes = ~work.communicates
    updates = computes & inside(work.launched, update)
    gradients = work.communicates & ~broadcasts & ~others
    chosen = (computes, computes & ~updates, work.communicates, gradients, broadcasts, others)
    compute, bare, exchanges, *each = (union((work.begin[which], work.end[which])) for which in chosen)
    exchanged: list[tuple[Kind, Spans]] = list(zip(_EXCHANGES, each, strict=True))
    layers: list[tuple[Kind, Spans]]
    if trace.has_kernels:
        layers = [("device", bare), ("optimizer", compute), *exchanged]
        layers += [("device", _calls(host.copies)), ("input", loader), ("idle", windows)]
    else:
        layers = [
            ("input", loader),
            ("optimizer", update),
            ("device", compute),
            *exchanged,
            ("loop", windows),
        ]
    spans, taken = dict[Kind, Spans](), union()
    for kind, layer in layers:
        spans[kind] = union(spans.get(kind, union()), within(without(layer, taken), windows))
        taken = union(taken, layer)
    ns = {kind: lengths(own, windows) for kind, own in spans.items()}
    is_whole = (work.group_sizes == 0) | (work.group_sizes == trace.world_size) | (trace.world_size is None)
    aligned = work.communicates & ~matches(work.names, _UNALIGNED) & is_whole
    collectives = dict[int, tuple[tuple[str, ...], Spans]]()
    for place, step in enumerate(trace.windows):
        which = np.flatnonzero(aligned & (work.at == place))
        which = which[np.argsort(work.begin[which], kind="stable")]
        collectives[step] = tuple(work.names[index] for index in which), (work.begin[which], work.end[which])
    return _Parts(
        trace=trace,
        windows=windows,
        spans=spans,
        ns=ns,
        hidden=lengths(exchanges, windows) - sum(ns[kind] for kind in _EXCHANGES),
        collectives=collectives,
    )


def _windows(trace: Trace, steps: Sequence[int]) -> Spans:
    """Return start and end of each step on the device; 0 for steps that the trace lacks."""
    work = trace.work
    begins, ends = np.zeros((2, len(steps)), dtype=np.int64)
    place_of = {step: place for place, step in enumerate(trace.windows)}
    for index, step in enumerate(steps):
        if (place := place_of.get(step)) is None:
            continue
        first, last = trace.windows[step]
        if trace.has_kernels:
            before = ((work.at >= 0) & (work.at < place)) | ((work.at == OUTSIDE) & (work.launched < first))
            first = max(first, int(work.end[before].max(initial=0)))
            last = max(first, last, int(work.end[work.at == place].max(initial=0)))
        begins[index], ends[index] = first, last
    return begins, ends


Waited = dict[tuple[int, int], Spans]
"""Times in which one rank waits for another, by the waiting rank and the late rank."""


def _waits(parts: Sequence[_Parts], ranks: Sequence[int], steps: Sequence[int], notes: list[str]) -> Waited:
    """Return the waits in collectives; empty, with another note, if the ranks cannot be aligned."""
    if len(ranks) == 1:
        return {}
    found = {(part.trace.rank, step): own for part in parts for step, own in part.collectives.items()}
    cannot = "which rank is waited for cannot be told"
    for step in steps:
        own = [found[rank, step][0] for rank in ranks]
        if odd := next((index for index, names in enumerate(own) if names != own[0]), None):
            of = " of other names" if len(own[0]) == len(own[odd]) else ""
            sizes = f"rank {ranks[0]} has {counted(len(own[0]), 'collective')} in step {step}"
            sizes += f", rank {ranks[odd]} {len(own[odd])}{of}"
            notes.append(f"{cannot}: {sizes}")
            return {}
    sides = [[np.stack(found[rank, step][1]) for step in steps] for rank in ranks]
    begins, ends = np.stack([np.concatenate(each, axis=1) for each in sides], axis=1)
    names = [name for step in steps for name in found[ranks[0], step][0]]
    broadcasts = matches(names, _BROADCAST)
    if broadcasts.all():
        notes.append(f"{cannot}: no collective waits for all ranks")
        return {}
    clocks = np.median((ends - ends[0])[:, ~broadcasts], axis=1, keepdims=True).astype(np.int64)
    begins_here, ends_here = begins - clocks, ends - clocks
    mean_ns = sum(int((part.windows[1] - part.windows[0]).sum()) for part in parts) / len(steps) / len(ranks)
    last = begins_here.max(axis=0)
    is_early = ends_here < last - _SAID * mean_ns
    scatter_ns = float(np.median(np.ptp(ends_here, axis=0)[~broadcasts]))
    if scatter_ns > _SCATTER * mean_ns or is_early.any(axis=0)[~broadcasts].mean() > _SCATTER:
        by = f"their ends differ by {_ms(scatter_ns * 1e-9)} in median, beyond the clocks' difference"
        notes.append(f"{cannot}: collectives of one index do not end together, {by}")
        return {}
    waits = np.where(is_early, 0, np.minimum(last, ends_here) - begins_here)
    of_step = np.repeat(np.arange(len(steps)), [len(found[ranks[0], step][0]) for step in steps])
    spans = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for column, (late, waited) in enumerate(_late(waits, is_early, of_step)):
        for index in map(int, np.flatnonzero(waited)):
            begin = int(begins[index, column])
            spans[ranks[index], ranks[late]].append((begin, begin + int(waited[index])))
    return {pair: union(tuple(np.array(each, dtype=np.int64).T)) for pair, each in spans.items()}


def _late(waits: Integers, is_early: Flags, of_step: Integers) -> Iterator[tuple[int, Integers]]:
    """Yield, for each collective, the index of the last rank to begin it, and the ns that each rank waits.

    ``waits``: ns until the last rank begins, by rank and collective. If several ranks begin about last, those
    that have waited before in this step were delayed by another rank: the one that has waited least is the
    last rank.
    """
    before = np.zeros(len(waits), dtype=np.int64)
    for column, step in enumerate(of_step):
        before *= column > 0 and step == of_step[column - 1]
        waited = waits[:, column].copy()
        is_last = ~is_early[:, column] & (waited <= _ABOUT * waited.max())
        late = int(np.where(is_last, before, np.iinfo(np.int64).max).argmin())
        before += waited
        waited[late] = 0
        yield late, waited


def _shares(parts: Sequence[_Parts], waits: Waited, ranks: Sequence[int], num_steps: int) -> Shares:
    """Return shares as means over steps, and over the ranks that are not the last of a step."""
    place = {rank: index for index, rank in enumerate(ranks)}
    kinds = list(dict.fromkeys(kind for part in parts for kind in part.ns))
    ns = {kind: np.zeros((len(ranks), num_steps)) for kind in kinds}
    waited = np.zeros((len(ranks), len(ranks), num_steps))
    for part in parts:
        own, rank = place[part.trace.rank or 0], part.trace.rank or 0
        for kind, each in part.ns.items():
            ns[kind][own] += each
        for kind in _EXCHANGES:
            left = part.spans[kind]
            for late in (late for late in ranks if (rank, late) in waits):
                during = lengths(within(left, waits[rank, late]), part.windows)
                waited[own, place[late]] += during
                ns[kind][own] -= during
                left = without(left, waits[rank, late])
    by_late: Floats = waited.sum(axis=0)
    last = np.where(by_late.max(axis=0) > 0, by_late.argmax(axis=0), -1)
    counts = np.arange(len(ranks))[:, None] != last
    shares = [Share(kind=kind, seconds=float(ns[kind][counts].mean()) * 1e-9) for kind in kinds]
    for index, rank in enumerate(ranks):
        if (seconds := float(waited[:, index][counts].mean()) * 1e-9) > 0:
            chosen = last == index if (last == index).any() else np.ones(num_steps, dtype=bool)
            others = np.arange(len(ranks)) != index
            excess = {kind: ns[kind][index] - ns[kind][others].mean(axis=0) for kind in _CAUSES if kind in ns}
            more = {kind: float(each[chosen].mean()) for kind, each in excess.items()}
            shares.append(Share(kind=max(more, key=lambda kind: more[kind]), seconds=seconds, rank=rank))
    shares = [share for share in shares if share.seconds > 0]
    step_s = sum(share.seconds for share in shares)
    lasts = Counter(ranks[index] for index in last if index >= 0)
    return Shares(
        step_s=step_s,
        num_steps=num_steps,
        num_ranks=len(ranks),
        shares=tuple(shares),
        steady_rank=steady_rank_of(shares, lasts, num_steps, step_s),
    )


def _notes(parts: Sequence[_Parts], idle: Idle, shares: Shares) -> Iterator[str]:
    """Yield sentences about idle time and communication."""
    least, num_ranks = _SAID * shares.step_s, max(part.trace.world_size or 1 for part in parts)
    for wait in (wait for wait in idle.host_waits if wait.idle_s > least):
        by = f"{wait.operator}{wait.caller and f' in {wait.caller}'}, {wait.per_step:.3g} times per step"
        yield f"the device is idle for {_ms(wait.idle_s)} per step after the host has waited for it in {by}"
    num_kernels = sum(int((part.trace.work.at >= 0).sum()) for part in parts)
    num_steps = sum(len(part.trace.windows) for part in parts)
    size = f"{counted(round(num_kernels / num_steps), 'kernel')} per step"
    if idle.late_s > least:
        where = f", mostly in {idle.late_in}" if idle.late_in else ""
        until = f"until the host launches its next kernel{where}; {size}"
        yield f"the device is idle for {_ms(idle.late_s)} per step {until}"
    if idle.launched_s > least:
        between = f"between kernels that were launched in time; {size}"
        yield f"the device is idle for {_ms(idle.launched_s)} per step {between}"
    is_slowed = any(call.is_python for part in parts for call in part.trace.host.calls)
    if is_slowed and max(idle.late_s, shares.of("loop")) > least:
        yield "calls of Python were recorded, which slows the host: without with_stack=True it is faster"
    if shares.num_ranks < num_ranks and shares.of(*EXCHANGES) > least:
        of = f"{counted(shares.num_ranks, 'rank')} of {num_ranks}"
        yield f"the traces are of {of}: communication includes waits for the others; their traces tell these"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _calls(calls: Iterable[Call]) -> Spans:
    """Return the times in which at least one of the calls is running."""
    times = np.array([(call.begin, call.end) for call in calls], dtype=np.int64).reshape(-1, 2)
    return union((times[:, 0], times[:, 1]))
