"""Causes of a slow step, each with its evidence and a remedy."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fleetbench.quantities import counted
from fleetbench.units import milliseconds, size
from fleetbench.why.change import DdpChange
from fleetbench.why.links import Links, Remark, remarks_of_links
from fleetbench.why.nccl_log import Transports
from fleetbench.why.nccl_log import remarks as remarks_of_log
from fleetbench.why.observed import RankLog, Readiness
from fleetbench.why.shares import Kind, Share, Shares
from fleetbench.why.steps import spans_of

NETWORK, SLOW = "the network", "a slow rank"
"""Names of causes."""
LEAST_SHARE = 0.02
"""Smallest share of a step that is a cause."""
_LEAST_INPUT = 0.05
"""Smallest share of a step that waiting for batches needs to be a cause: each loop takes its next batch from somewhere."""
_UNEVEN = 1.1
"""Ratio of two batches' sizes from which they are uneven."""
_OWN_CODE: tuple[tuple[Kind, str, float], ...] = (
    ("loop", "the script's own code", 0.1),
    ("collective", "the script's own collectives", LEAST_SHARE),
)
"""What else a loop does, and from which share of a step on it is a cause: each loop computes its loss."""
_DOING: dict[Kind, str] = {
    "input": "waits for its batches",
    "forward": "computes its forward",
    "backward": "computes its backward",
    "optimizer": "updates",
    "loop": "runs the script's own code",
    "evaluate": "evaluates",
    "save": "saves",
    "device": "computes",
    "idle": "leaves its device idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What pairs of legs in the living script came to: seconds per step, with and without a remedy."""

    today_s: float
    other_s: float
    low_s: float
    """Ends of the 90 % interval of ``other_s``, at the same seconds today."""
    high_s: float
    pairs: int

    @property
    def helps(self) -> bool:
        """Whether the interval lies below today's seconds."""
        return self.high_s < self.today_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing that makes a step longer."""

    name: str
    """A heading: ``a slow rank``."""
    what: str
    """The evidence, as a sentence."""
    shares: tuple[Share, ...]
    """Parts of a step that it takes."""
    remedy: str = ""
    """What to type or to do; empty: nothing is known that helps."""
    change: DdpChange | None = None
    """The remedy, where the living script can try it."""
    spares: bool = True
    """Whether the remedy takes its shares away; or else ``change`` alone tells what it does."""
    trains_differently: str = ""
    """How training changes by it."""
    interface: float | None = None
    """By which factor it makes the link faster."""
    simulated_s: float | None = None
    """Seconds of a step with the remedy, simulated from the job's own profile."""
    tried: Tried | None = None

    @property
    def seconds(self) -> float:
        """Seconds per step of its shares."""
        return sum(share.seconds for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All that is known of a job."""

    logs: tuple[RankLog, ...]
    shares: Shares
    alone: Readiness | None = None
    links: Links | None = None
    transports: Transports | None = None
    """NCCL's, where its log says them."""

    @property
    def local_ranks(self) -> int:
        """Ranks of rank 0's host."""
        return sum(log.host == self.logs[0].host for log in self.logs)


def causes_of(seen: Seen) -> list[Cause]:
    """The causes; those of less than 2 % of a step are left out, but not settings whose costs no share shows."""
    found = [*_ranks(seen), *_network(seen), *_buffers(seen), *_seldom(seen), *_loop(seen)]
    least = LEAST_SHARE * seen.shares.step_s
    return [cause for cause in found if cause.seconds >= least] + [*_unused(seen), *_threads(seen)]


def _waits(seen: Seen, *, rank: int | None) -> tuple[Share, ...]:
    """Waits in every step, for a rank, or for any."""
    return tuple(s for s in seen.shares.shares if s.rank is not None and s.period is None and rank in (None, s.rank))


def _ranks(seen: Seen) -> Iterator[Cause]:
    """A slow rank, and the loaders of all ranks: one cause where the slow rank waits for its batches."""
    slow, inputs = list(_slow_rank(seen)), list(_input(seen))
    for cause in slow:
        waits_for_batches = cause.name == SLOW and any(share.kind == "input" for share in cause.shares[:1])
        yield replace(cause, shares=(*cause.shares, *(share for each in inputs for share in each.shares))) if waits_for_batches else cause
        inputs = [] if waits_for_batches else inputs
    yield from inputs


def _slow_rank(seen: Seen) -> Iterator[Cause]:
    rank = seen.shares.steady_rank
    if rank is None:
        waits = _waits(seen, rank=None)
        uneven = _uneven_batches(seen)
        what = uneven or "the slowest rank changes from step to step"
        remedy = "give all ranks batches of one size in a step: sort by length, or count tokens instead of samples" if uneven else ""
        name = "uneven batches" if uneven else "ranks wait for each other"
        yield Cause(name=name, what=what, shares=waits, remedy=remedy, spares=bool(uneven))
        return
    waits = _waits(seen, rank=rank)
    kind = max(waits, key=lambda share: share.seconds).kind
    own, others = _own_s(seen, rank, kind), [_own_s(seen, other.rank, kind) for other in seen.logs if other.rank != rank]
    both = milliseconds(own), milliseconds(statistics.fmean(others))
    what = f"rank {rank} {_DOING.get(kind, kind)} for {both[0]} ms per step, the others for {both[1]} ms"
    ratio = _batch(seen.logs[rank]) / max(1.0, statistics.fmean(_batch(log) for log in seen.logs if log.rank != rank))
    remedy = f"look at {seen.logs[rank].host}: other programs, clocks, temperature" if len(seen.logs) > seen.local_ranks else ""
    if kind in ("forward", "backward", "device", "optimizer", "loop") and ratio > _UNEVEN:
        name, what = "uneven batches", f"{what}; its batches are {ratio:.2g} times as large"
        remedy = "give each rank as many samples: DistributedSampler does"
    else:
        name = SLOW
        if kind == "input":
            remedy = _more_workers(seen, rank)
        line = _line(seen, rank, kind)
        what += f", most of it in {line}" if line else ""
    yield Cause(name=name, what=what, shares=waits, remedy=remedy)


def _uneven_batches(seen: Seen) -> str:
    """Where the last rank of a step is the one with the largest batch, as a sentence."""
    num = min(len(log.batches) for log in seen.logs)
    steps = [[log.batches[step] for log in seen.logs] for step in range(num)]
    uneven = [sizes for sizes in steps if max(sizes) > _UNEVEN * min(sizes) > 0]
    if len(uneven) < num / 2 or not uneven:
        return ""
    ratio = statistics.median(max(sizes) / min(sizes) for sizes in uneven)
    return f"the largest batch of a step is {ratio:.2g} times as large as the smallest, and ranks wait for it"


def _input(seen: Seen) -> Iterator[Cause]:
    shares = seen.shares.part("input")
    loader = seen.logs[0].loader
    took_s = sum(share.seconds for share in shares)
    if took_s < _LEAST_INPUT * seen.shares.step_s:
        return
    what = f"each rank waits {milliseconds(took_s)} ms per step for its next batch"
    if loader is not None:
        what += f", with num_workers={loader.num_workers}"
    yield Cause(name="the loader", what=what, shares=shares, remedy=_more_workers(seen, 0))


def _more_workers(seen: Seen, rank: int) -> str:
    """More processes that make batches; nothing where a batch is computed and no core is free."""
    log = seen.logs[rank]
    if log.loader is None:
        return "make batches in other processes, beside the training: DataLoader(..., num_workers=4)"
    busy = sum(other.cpu_cores for other in seen.logs if other.host == log.host)
    free = max(0.0, log.cores - busy)
    if free < 0.5 and log.loader.cpu_share > 0.5:
        return ""
    waits_s = _own_s(seen, rank, "input")
    num = 2 * log.loader.num_workers or math.ceil(waits_s / max(1e-9, seen.shares.step_s - waits_s))
    return f"DataLoader(..., num_workers={num}, persistent_workers=True)"


def _network(seen: Seen) -> Iterator[Cause]:
    shares = seen.shares.part("gradients")
    model = seen.logs[0].model
    if model is None or len(seen.logs) == 1:
        return
    own = seen.shares.of("gradients")
    num = len(model.bucket_nbytes)
    what = f"{size(model.nbytes)} of gradients in {counted(num, 'bucket')}, of which the backward does not hide {milliseconds(own)} ms"
    remarks, factor = list[Remark](), None
    if seen.links is not None:
        what += f"; an all-reduce gets {seen.links.busbw_bytes_per_s * 8e-9:.3g} Gbit/s on this job's links"
        faster = seen.links.faster_interface()
        factor = None if faster is None else faster[1]
        remarks += remarks_of_links(seen.links)
        if seen.transports is not None:
            has_infiniband = any(host.has_infiniband for host in seen.links.hosts)
            remarks += remarks_of_log(seen.transports, len(seen.links.hosts), has_infiniband)
    what = ". ".join([what, *(remark.what.rstrip(".") for remark in remarks[:2])])
    remedy = next((remark.remedy for remark in remarks), "")
    yield Cause(name=NETWORK, what=what, shares=shares, remedy=remedy, spares=False, interface=factor)


def _buffers(seen: Seen) -> Iterator[Cause]:
    shares = seen.shares.part("buffers")
    model = seen.logs[0].model
    if model is None or not shares:
        return
    changes = any(log.model is not None and log.model.buffers_change for log in seen.logs)
    why = "each rank keeps its own statistics in between, and rank 0's are saved" if changes else ""
    what = f"rank 0 sends {size(model.buffers_nbytes)} of buffers before each forward" + (
        "" if changes else ", and no forward changes them"
    )
    remedy = "DistributedDataParallel(..., broadcast_buffers=False)"
    yield Cause(name="buffers", what=what, shares=shares, remedy=remedy, change=DdpChange(broadcast_buffers=False), trains_differently=why)


def _unused(seen: Seen) -> Iterator[Cause]:
    model, name = seen.logs[0].model, "the search for unused parameters"
    if model is None or not model.find_unused_parameters:
        return
    shares, change = seen.shares.part("unused"), None
    what, remedy = "DDP looks for unused parameters in each step, and exchanges what it found", ""
    if seen.alone is not None:
        unused = len(seen.alone.unused)
        what += (
            f"; {counted(unused, 'parameter')} got no gradient in some step" if unused else "; each parameter got a gradient in each step"
        )
        if not unused:
            remedy, change = "DistributedDataParallel(..., find_unused_parameters=False)", DdpChange(find_unused_parameters=False)
    if remedy or sum(share.seconds for share in shares) >= LEAST_SHARE * seen.shares.step_s:
        yield Cause(name=name, what=what, shares=shares, remedy=remedy, change=change, spares=False)


def _seldom(seen: Seen) -> Iterator[Cause]:
    """Work that comes in some steps only, on all ranks or on one."""
    groups: dict[Kind, list[Share]] = {}
    for share in seen.shares.shares:
        if share.period is not None:
            groups.setdefault(share.kind, []).append(share)
    for kind, shares in groups.items():
        largest = max(shares, key=lambda share: share.seconds)
        rank, period = largest.rank or 0, largest.period or 1
        once_s = sum(share.seconds for share in shares if share.period == period) * period
        actor = "each rank" if largest.rank is None else f"rank {rank}"
        line = _line(seen, rank, kind, rare=True)
        often = "one of the steps" if period >= seen.shares.num_steps else f"every {period} steps"
        what = f"{actor} {_DOING.get(kind, 'exchanges')} for {milliseconds(once_s)} ms in {often}" + (f", in {line}" if line else "")
        remedy = {
            "save": "save less often, or beside the training: torch.distributed.checkpoint.async_save",
            "evaluate": "evaluate less often, or on fewer batches",
            "input": "DataLoader(..., persistent_workers=True)",
        }.get(kind, "do it less often")
        yield Cause(name="periodic work", what=what, shares=tuple(shares), remedy=remedy)


def _loop(seen: Seen) -> Iterator[Cause]:
    for kind, name, least in _OWN_CODE:
        shares = seen.shares.part(kind)
        took_s = sum(share.seconds for share in shares)
        if took_s < least * seen.shares.step_s:
            continue
        line = _line(seen, 0, kind)
        calls = "code outside of forward, backward and update takes" if kind == "loop" else "its calls of torch.distributed take"
        is_scripts = kind == "collective" and " of " not in line  # as opposed to a library's
        remedy = "average it over steps, or exchange it seldom" if is_scripts else ""
        what = f"{calls} {milliseconds(took_s)} ms per step" + (f", most of it in {line}" if line else "")
        yield Cause(name=name, what=what, shares=shares, remedy=remedy)


def _threads(seen: Seen) -> Iterator[Cause]:
    """Threads of torch that are more than the cores, or fewer than half of them; on GPUs they matter little."""
    log, ranks = seen.logs[0], seen.local_ranks
    fair = max(1, log.cores // ranks)
    if log.device != "cpu" or log.threads == fair:
        return
    if log.threads > fair:
        what = f"{counted(ranks, 'rank')} with {log.threads} threads each share {counted(log.cores, 'core')}"
    elif log.threads * ranks <= log.cores / 2:
        what = f"{counted(ranks, 'rank')} with {counted(log.threads, 'thread')} each leave most of {log.cores} cores idle"
    else:
        return
    remedy = f"DistributedStrategy(..., thread_num={fair})" if log.wrapper == "fleet" else f"OMP_NUM_THREADS={fair}"
    yield Cause(name="threads", what=what, shares=(), remedy=remedy, change=DdpChange(threads=fair), spares=False)


def _own_s(seen: Seen, rank: int, kind: Kind) -> float:
    """Seconds per step of a rank's own."""
    log = seen.logs[rank]
    spans = [span.end_ns - span.start_ns for span in spans_of(log) if span.kind == kind]
    return sum(spans) * 1e-9 / max(1, log.num_steps)


def _batch(log: RankLog) -> float:
    return statistics.fmean(log.batches) if log.batches else 0.0


def _line(seen: Seen, rank: int, kind: Kind, *, rare: bool = False) -> str:
    """The script's line in which most samples of a kind fall, if that is a third of them; ``rare``: of its longest spans."""
    log = seen.logs[rank]
    spans = [span for span in spans_of(log) if span.kind == kind]
    if rare and spans:
        longest = max(span.end_ns - span.start_ns for span in spans)
        spans = [span for span in spans if span.end_ns - span.start_ns > longest / 3]
    lines: Counter[str] = Counter()
    position = 0
    for time_ns, line in log.samples:
        at = time_ns
        while position < len(spans) and spans[position].end_ns <= at:
            position += 1
        if position < len(spans) and spans[position].start_ns <= at:
            lines[line] += 1
    line, num = lines.most_common(1)[0] if lines else ("", 0)
    return line if num >= max(2, sum(lines.values()) / 3) else ""
