"""Causes of a slow step, each with its evidence and, if one is known, a remedy."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fleetbench.quantities import counted
from fleetbench.units import milliseconds, size
from fleetbench.why.change import DdpChange
from fleetbench.why.links import Links, Remark, remarks_of_links
from fleetbench.why.nccl_log import Transports
from fleetbench.why.nccl_log import remarks as remarks_of_log
from fleetbench.why.observed import Model, RankLog, Readiness
from fleetbench.why.shares import COMPUTE, Kind, Share, Shares, total_s
from fleetbench.why.steps import spans_of, steps_of

NETWORK, SLOW = "the network", "a slow rank"
"""Names of the causes for a slow network and for a slow rank."""
_LEAST_WITHOUT_REMEDY = 0.05
"""Smallest share of a step that is a cause if no remedy is known."""
LEAST_SHARE = 0.02
"""Smallest share of a step that is a cause."""
_LEAST_INPUT = 0.05
"""Smallest share of a step at which waiting for batches is a cause. Every loop spends some time on its next
batch."""
_UNEVEN = 1.1
"""Ratio of two batch sizes above which they count as uneven."""
_LEAST_CODE = 0.1
"""Smallest share of a step at which the script's own code is a cause."""
DOING: dict[Kind, str] = {
    "input": "waits for its batches",
    "forward": "computes its forward",
    "backward": "computes its backward",
    "optimizer": "updates",
    "loop": "runs the script's own code",
    "evaluate": "evaluates",
    "unused": "searches for unused parameters",
    "collective": "exchanges",
    "save": "saves",
    "device": "computes",
    "idle": "leaves its device idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result of trying a remedy in the running script, in pairs of legs with and without it."""

    today_s: float
    """Seconds per step without the remedy."""
    other_s: float
    """Seconds per step with the remedy."""
    low_s: float
    """Lower end of the 90 % interval of ``other_s``, for a fixed ``today_s``."""
    high_s: float
    """Upper end of the 90 % interval of ``other_s``."""
    pairs: int
    """Number of pairs of legs."""

    @property
    def helps(self) -> bool:
        """Whether the whole interval is below ``today_s``."""
        return self.high_s < self.today_s

    def __str__(self) -> str:
        """Return the milliseconds per step today and with the remedy, with the interval."""
        today, other, low, high = (milliseconds(seconds) for seconds in (self.today_s, self.other_s, self.low_s, self.high_s))
        return f"{today} -> {other} ms [{low}, {high}], {counted(self.pairs, 'pair')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing that makes a step longer."""

    name: str
    """Name, used as a heading: ``a slow rank``."""
    what: str
    """Evidence, as a sentence."""
    shares: tuple[Share, ...]
    """Shares of a step that the cause takes."""
    remedy: str = ""
    """Argument, variable or action that helps; empty if none is known."""
    change: DdpChange | None = None
    """The remedy as a change that the running script can try; None if it cannot try the remedy."""
    spares: bool = True
    """Whether the remedy removes ``shares``. If not, ``change`` or ``interface`` define its effect."""
    trains_differently: str = ""
    """How the remedy changes training; empty if it does not."""
    is_bound: bool = False
    """Whether the simulated seconds are a bound: the remedy does the work less often, and does not remove it."""
    regained: float = 1.0
    """Part of ``shares`` that the remedy regains."""
    interface: float | None = None
    """Factor by which another network interface makes the link faster; None if no faster one is known."""
    simulated_s: float | None = None
    """Simulated seconds per step with the remedy, or without the cause if no remedy is known."""
    tried: Tried | None = None
    """Result of trying the remedy; None if it was not tried."""

    @property
    def seconds(self) -> float:
        """Seconds per step of ``shares``."""
        return total_s(self.shares)

    @property
    def is_simulated(self) -> bool:
        """Whether the simulator knows what a step without the cause is, beside other remedies."""
        return self.regained == 1.0 and (self.spares or self.interface is not None or self.change is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything observed about a job."""

    logs: tuple[RankLog, ...]
    """Records of all ranks."""
    shares: Shares
    """Shares of a step."""
    ready: Readiness | None = None
    """Readiness of gradients; None if not measured."""
    links: Links | None = None
    """Measured links; None if not measured."""
    transports: Transports | None = None
    """NCCL's transports; None if the job's output does not report them."""

    @property
    def model(self) -> Model:
        """Model that rank 0 trains."""
        return self.logs[0].model

    @property
    def local_ranks(self) -> int:
        """Number of ranks on rank 0's host."""
        return sum(log.host == self.logs[0].host for log in self.logs)


def causes_of(seen: Seen) -> list[Cause]:
    """Return causes that take at least 2 % of a step, and settings whose full cost no share shows."""
    found = [*_ranks(seen), *_network(seen), *_accumulation(seen), *_regathers(seen), *_buffers(seen), *_seldom(seen), *_loop(seen)]
    least = LEAST_SHARE * seen.shares.step_s
    return [cause for cause in found if cause.seconds >= least] + [*_unused(seen), *_threads(seen)]


def ranked(causes: Sequence[Cause], step_s: float) -> list[Cause]:
    """Return the causes of a step of ``step_s`` seconds, largest gain first, without small ones that have no remedy.

    A gain without a remedy counts half, because it is a bound: no network takes no time.
    """
    kept = [cause for cause in causes if cause.remedy or cause.seconds >= _LEAST_WITHOUT_REMEDY * step_s]
    return sorted(kept, key=lambda cause: (-gain_s(cause, step_s) * (1.0 if cause.remedy else 0.5), -cause.seconds))


def gain_s(cause: Cause, step_s: float) -> float:
    """Return the seconds that a step of ``step_s`` seconds saves without the cause, as tried or simulated."""
    if cause.tried is not None:
        return (1 - cause.tried.other_s / cause.tried.today_s) * step_s if cause.tried.helps else 0.0
    return 0.0 if cause.simulated_s is None else step_s - cause.simulated_s


def _ranks(seen: Seen) -> Iterator[Cause]:
    """Yield the causes of waiting for other ranks, and for batches.

    These are one cause if a rank is slow because it waits for its batches.
    """
    inputs = list(_input(seen))
    waits = tuple(share for share in seen.shares.shares if share.rank is not None and share.period is None)
    rank = seen.shares.steady_rank
    if rank is None:
        yield _changing_rank(seen, waits)
    else:
        waits = tuple(share for share in waits if share.rank == rank)
        slow = _slow_rank(seen, rank, waits)
        if slow.name == SLOW and waits[0].kind == "input":
            slow, inputs = replace(slow, shares=(*waits, *(share for each in inputs for share in each.shares))), []
        yield slow
    yield from inputs


def _changing_rank(seen: Seen, waits: tuple[Share, ...]) -> Cause:
    """Return the cause of waits for a slowest rank that changes from step to step.

    It is uneven batches if, in at least half of the steps, the largest batch is more than 10 % larger than
    the smallest.
    """
    steps = list(zip(*(log.batches for log in seen.logs), strict=False))
    ratios = [max(sizes) / min(sizes) for sizes in steps if max(sizes) > _UNEVEN * min(sizes) > 0]
    if not ratios or len(ratios) < len(steps) / 2:
        what = "the slowest rank changes from step to step"
        return Cause(name="ranks wait for each other", what=what, shares=waits, spares=False)
    ratio = statistics.median(ratios)
    what = f"the largest batch of a step is {ratio:.2g} times as large as the smallest, and ranks wait for it"
    remedy = "give all ranks batches of one size in a step: sort by length, or count tokens instead of samples"
    return Cause(name="uneven batches", what=what, shares=waits, remedy=remedy)


def _slow_rank(seen: Seen, rank: int, waits: tuple[Share, ...]) -> Cause:
    """Return the cause of waits for the slow rank ``rank``; ``waits`` are their shares, the longest first."""
    kind, log, others = waits[0].kind, seen.logs[rank], [log for log in seen.logs if log.rank != rank]
    own_s, other_s = _own_s(log, kind), statistics.fmean(_own_s(other, kind) for other in others)
    what = f"rank {rank} {DOING[kind]} for {milliseconds(own_s)} ms per step, the others for {milliseconds(other_s)} ms"
    ratio = _batch(log) / max(1.0, statistics.fmean(map(_batch, others)))
    if kind in (*COMPUTE, "loop") and ratio > _UNEVEN:
        what += f"; its batches are {ratio:.2g} times as large"
        remedy = "give each rank as many samples: DistributedSampler does"
        regained = 1 - 1 / len(seen.logs)  # what is taken from this rank goes to all
        return Cause(name="uneven batches", what=what, shares=waits, remedy=remedy, regained=regained)
    elsewhere = f"look at {log.host}: other programs, clocks, temperature" if len(seen.logs) > seen.local_ranks else ""
    remedy = _more_workers(seen, rank) if kind == "input" else elsewhere
    return Cause(name=SLOW, what=what + _mostly(_line(log, kind)), shares=waits, remedy=remedy)


def _input(seen: Seen) -> Iterator[Cause]:
    shares, loader = seen.shares.part("input"), seen.logs[0].loader
    if total_s(shares) >= _LEAST_INPUT * seen.shares.step_s:
        what = f"each rank waits {milliseconds(total_s(shares))} ms per step for its next batch"
        what += "" if loader is None else f", with num_workers={loader.num_workers}"
        yield Cause(name="the loader", what=what, shares=shares, remedy=_more_workers(seen, 0))


def _more_workers(seen: Seen, rank: int) -> str:
    """Advise more loader processes, or cheaper batches if no core is free for them."""
    log = seen.logs[rank]
    if log.loader is None:
        return "make batches in other processes, beside the training: DataLoader(..., num_workers=4)"
    free = log.cores - sum(other.cpu_cores for other in seen.logs if other.host == log.host)
    if free < 0.5:
        return "no core is free for more loader processes: make batches cheaper, or in advance"
    waits_s = _own_s(log, "input")
    num = 2 * log.loader.num_workers or math.ceil(waits_s / max(1e-9, seen.shares.step_s - waits_s))
    return f"DataLoader(..., num_workers={num}, persistent_workers=True)"


def _network(seen: Seen) -> Iterator[Cause]:
    if len(seen.logs) == 1:
        return
    own_s, num, model = seen.shares.of("gradients"), len(seen.model.bucket_nbytes), seen.model
    units = counted(num, "unit" if model.gathered_nbytes else "bucket")
    told = [f"{size(model.nbytes)} of gradients in {units}, of which the backward does not hide {milliseconds(own_s)} ms"]
    if model.gathered_nbytes:
        told[0] += f", and {size(model.gathered_nbytes)} of parameters, which are gathered for {milliseconds(seen.shares.of('gathers'))} ms"
    remarks, faster = list[Remark](), None
    if seen.links is not None:
        told[0] += f"; an all-reduce gets {seen.links.busbw_bytes_per_s * 8e-9:.3g} Gbit/s on this job's links"
        faster = seen.links.faster_interface()
        remarks += remarks_of_links(seen.links)
        if seen.transports is not None:
            has_infiniband = any(host.has_infiniband for host in seen.links.hosts)
            remarks += remarks_of_log(seen.transports, len(seen.links.hosts), has_infiniband)
    yield Cause(
        name=NETWORK,
        what=". ".join([*told, *(remark.what.rstrip(".") for remark in remarks[:2])]),
        shares=seen.shares.part("gradients", "gathers"),
        remedy=remarks[0].remedy if remarks else "",
        spares=False,
        interface=faster[1] if faster else None,
    )


def _accumulation(seen: Seen) -> Iterator[Cause]:
    """Yield exchanges of accumulated gradients, of which only the last of a step is needed."""
    shares, num = (
        seen.shares.part("gradients"),
        round(statistics.median(sum(one.kind == "gradients" for one in step[0].meetings) for step in steps_of(seen.logs))),
    )
    if num > 1 and seen.logs[0].num_models == 1 and not seen.model.gathered_nbytes:
        yield Cause(
            name="an exchange in each backward",
            what=f"each of the {num} backwards of a step exchanges {size(seen.model.nbytes)} of gradients, and only the last needs to",
            shares=shares,
            remedy="with model.no_sync(): around the forwards and backwards of a step, except the last",
            spares=False,
            simulated_s=seen.shares.step_s - (1 - 1 / num) * total_s(shares),
        )


def _buffers(seen: Seen) -> Iterator[Cause]:
    shares = seen.shares.part("buffers")
    if shares:
        changes = any(log.model.buffers_change for log in seen.logs)
        never = "" if changes else ", and no forward changes them"
        yield Cause(
            name="buffers",
            what=f"rank 0 sends {size(seen.model.buffers_nbytes)} of buffers before each forward{never}",
            shares=shares,
            remedy="DistributedDataParallel(..., broadcast_buffers=False)",
            change=DdpChange(broadcast_buffers=False),
            trains_differently="each rank keeps its own statistics in between, and rank 0's are saved" if changes else "",
        )


def _regathers(seen: Seen) -> Iterator[Cause]:
    shares, model = seen.shares.part("regathers"), seen.model
    if shares:
        more = model.regathered_nbytes * (model.shard_ranks - 1) // model.shard_ranks
        yield Cause(
            name="parameters are gathered twice",
            what=f"{size(model.regathered_nbytes)} of parameters are freed after their forward, and gathered again for the backward",
            shares=shares,
            remedy=f"fully_shard(..., reshard_after_forward=False), if each rank has {size(more)} to spare",
            change=DdpChange(reshard_after_forward=False),
        )


def _unused(seen: Seen) -> Iterator[Cause]:
    if not seen.model.find_unused_parameters:
        return
    shares, what = seen.shares.part("unused"), "DDP looks for unused parameters in each step, and exchanges what it found"
    remedy, change = "", None
    if seen.ready is not None and seen.ready.unused:
        what += f"; {counted(len(seen.ready.unused), 'parameter')} got no gradient in some step"
    elif seen.ready is not None:
        what += "; each parameter got a gradient in each step"
        remedy, change = "DistributedDataParallel(..., find_unused_parameters=False)", DdpChange(find_unused_parameters=False)
    if remedy or total_s(shares) >= LEAST_SHARE * seen.shares.step_s:
        yield Cause(name="the search for unused parameters", what=what, shares=shares, remedy=remedy, change=change, spares=False)


def _seldom(seen: Seen) -> Iterator[Cause]:
    """Yield the causes that are work in some steps only, on all ranks or on one."""
    found = [share for share in seen.shares.shares if share.period is not None]
    for kind in dict.fromkeys(share.kind for share in found):
        shares = tuple(share for share in found if share.kind == kind)
        rank, period = shares[0].rank, shares[0].period or 1  # those of the longest share
        once_s = total_s(share for share in shares if share.period == period) * period
        actor = "each rank" if rank is None else f"rank {rank}"
        often = "one of the steps" if period >= seen.shares.num_steps else f"every {period} steps"
        line = _line(seen.logs[rank or 0], kind, rare=True)
        what = f"{actor} {DOING[kind]} for {milliseconds(once_s)} ms in {often}" + (f", in {line}" if line else "")
        remedy = {
            "save": "save less often, or beside the training: torch.distributed.checkpoint.async_save",
            "evaluate": "evaluate less often, or on fewer batches",
            "input": "DataLoader(..., persistent_workers=True)",
        }.get(kind, "do it less often")
        yield Cause(name="periodic work", what=what, shares=shares, remedy=remedy, is_bound=kind != "input")


def _loop(seen: Seen) -> Iterator[Cause]:
    """Yield the script's own code and its own collectives as causes.

    Code counts from a tenth of a step on, because every loop computes its loss.
    """
    code, calls = seen.shares.part("loop"), seen.shares.part("collective")
    if total_s(code) >= _LEAST_CODE * seen.shares.step_s:
        what = f"code outside of forward, backward and update takes {milliseconds(total_s(code))} ms per step"
        yield Cause(name="the script's own code", what=what + _mostly(_line(seen.logs[0], "loop")), shares=code)
    line = _line(seen.logs[0], "collective")
    what = f"its calls of torch.distributed take {milliseconds(total_s(calls))} ms per step{_mostly(line)}"
    remedy = "" if seen.logs[0].wrapper in ("Trainer", "Lightning") else "average it over steps, or exchange it seldom"
    yield Cause(name="the script's own collectives", what=what, shares=calls, remedy=remedy, is_bound=True)


def _threads(seen: Seen) -> Iterator[Cause]:
    """Yield a cause if the ranks' torch threads exceed the cores, or use at most half of them.

    On GPUs the number of threads hardly matters.
    """
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
    remedy = f"torch.set_num_threads({fair})" if log.sets_threads else f"OMP_NUM_THREADS={fair}"
    remedy = f"DistributedStrategy(..., thread_num={fair})" if log.wrapper == "fleet" else remedy
    yield Cause(name="threads", what=what, shares=(), remedy=remedy, change=DdpChange(threads=fair), spares=False)


def _own_s(log: RankLog, kind: Kind) -> float:
    """Return the seconds per step that a rank spends on work of this kind."""
    return sum(span.end_ns - span.start_ns for span in spans_of(log) if span.kind == kind) * 1e-9 / max(1, log.num_steps)


def _batch(log: RankLog) -> float:
    return statistics.fmean(log.batches) if log.batches else 0.0


def _mostly(line: str) -> str:
    return f", most of it in {line}" if line else ""


def _line(log: RankLog, kind: Kind, *, rare: bool = False) -> str:
    """Return the script's line with the most samples of a kind; empty if it has less than a third of them.

    ``rare``: only of the longest spans.
    """
    spans = [span for span in spans_of(log) if span.kind == kind]
    longest = max((span.end_ns - span.start_ns for span in spans), default=0)
    spans = [span for span in spans if not rare or span.end_ns - span.start_ns > longest / 3]
    begins = [span.start_ns for span in spans]
    lines: Counter[str] = Counter()
    for time_ns, line in log.samples:
        place = bisect.bisect_right(begins, time_ns) - 1
        if place >= 0 and time_ns < spans[place].end_ns:
            lines[line] += 1
    ((line, num),) = lines.most_common(1) or [("", 0)]
    return line if num >= max(2, lines.total() / 3) else ""
