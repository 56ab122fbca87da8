"""Steps: what each rank did in each step, which rank it waited for, and the resulting shares.

A rank's time is cut into spans of one activity: of nested events only the inner one counts, and time outside
of all events belongs to the script's loop. Ranks meet in exchanges, and the n-th exchange of a step is the
same on all ranks. Until the last rank arrives, the others wait for it; the rest is the exchange itself. The
reason why the last rank is late is what it did more of than the others since the previous exchange.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

from fleetbench.errors import ConfigError
from fleetbench.why.observed import Event, RankLog
from fleetbench.why.shares import EXCHANGES, Kind, Share, Shares

LEAST_STEPS = 5
"""Least number of steps that allow a conclusion."""
_NOW_AND_THEN: tuple[Kind, ...] = ("input", "loop", "save", "evaluate", "collective")
"""Activities that may take longer in some steps than in others because of occasional work."""
_SELDOM = 0.5
"""Largest share of steps that may contain work for it to count as occasional."""
_OUTLIER = 0.2
"""Smallest excess of occasional work over an activity's usual time, as a share of a median step."""
_STALL = 2.0
"""Smallest excess of work at irregular intervals over an activity's usual time, as a share of a median step. It
is larger than ``_OUTLIER`` because another program may cause such work. Saving and evaluating are exempt."""
_LEAST_GAPS, _REGULAR = 2, 0.6
"""For work at regular intervals: least number of intervals, and least share of them that are equal."""
_STEADY = 0.75
"""Least share of the steps, and of all waits, from which a rank counts as slower than the others."""
_ABOUT = 0.1
"""Share of the longest wait up to which a rank's own wait shows that it began an exchange about last."""
_MOST_LATE = 0.02
"""Least share of a step, spent waiting for a rank, for that rank to count as slower than the others."""


class Span(NamedTuple):
    """A period in which a rank did one thing; ``meets`` marks an exchange."""

    kind: Kind
    start_ns: int
    end_ns: int
    meets: bool


class Seldom(NamedTuple):
    """Steps in which a rank spends more time on a kind of activity than in most steps."""

    usual_ns: float
    period: int
    steps: frozenset[int]


@dataclass(slots=True)
class Meeting:
    """A rank's part in an exchange."""

    kind: Kind
    start_ns: int
    end_ns: int
    since: dict[Kind, int]
    """Nanoseconds of the rank's activities since the previous exchange, by kind."""
    before_ns: int
    """End of the previous exchange in ns; of the first exchange, start of the first step."""
    bare_ns: int
    """Nanoseconds at the end of the exchange that no compute hides."""
    name: str = ""
    """Name of the exchange; those of one exchange are equal on all ranks."""


@dataclass(slots=True)
class RankStep:
    """One rank's step, in ns."""

    own: dict[Kind, int] = field(default_factory=lambda: defaultdict(int))
    """Time of the rank's own activities, by kind."""
    exposed: dict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    """Time of exchanges after the last rank has arrived, by kind."""
    waited: dict[tuple[int, Kind], float] = field(default_factory=lambda: defaultdict(float))
    """Time of waits, by the rank that was waited for and what it did more of."""
    meetings: list[Meeting] = field(default_factory=list)
    """Exchanges of the step, in order."""


def shares_of(logs: Sequence[RankLog]) -> Shares:
    """Return the shares of the steps that all ranks recorded. Raises ``ConfigError`` for fewer than five."""
    steps = steps_of(logs)
    if len(steps) < LEAST_STEPS:
        hint = "let it train 20 steps at least, of which the first five are not counted; a step ends where optimizer.step() returns"
        raise ConfigError("ends before enough of its steps were seen", "the command", f"{len(steps)} steps", hint)
    step_s = math.fsum((log.step_ends_ns[len(steps)] - log.step_ends_ns[0]) * 1e-9 for log in logs) / (len(logs) * len(steps))
    seldom = [_seldom(log, [step[rank] for step in steps]) for rank, log in enumerate(logs)]
    return divided(steps, step_s, range(len(logs)), seldom)


def divided(
    steps: Sequence[Sequence[RankStep]], step_s: float, ranks: Sequence[int], seldom: Sequence[Mapping[Kind, Seldom]] = ()
) -> Shares:
    """Return the shares of steps whose ranks have met, which take ``step_s`` seconds in the mean.

    ``ranks``: number of each rank. ``seldom``: occasional work of each rank, by kind.
    """
    sums: Counter[tuple[Kind, int | None, int | None]] = Counter()
    lasts: Counter[int] = Counter()
    for number, step in enumerate(steps):
        waits = [sum(own.waited.values()) for own in step]
        last = waits.index(min(waits)) if any(waits) else -1
        lasts[ranks[last]] += last >= 0
        others = [rank for rank in range(len(step)) if rank != last]
        for rank in others:
            for key, ns in _parts(step[rank], rank, number, seldom):
                sums[key] += ns / len(others)  # type: ignore[assignment]  # a mean
    to_s = step_s / math.fsum(sums.values())  # steps of ranks that are not the last differ in length by a per cent or two
    shares = [
        Share(kind=kind, seconds=ns * to_s, rank=None if late is None else ranks[late], period=period)
        for (kind, late, period), ns in sums.items()
        if ns > 0
    ]
    shares.sort(key=lambda share: -share.seconds)
    return Shares(
        step_s=step_s,
        num_steps=len(steps),
        num_ranks=len(ranks),
        shares=tuple(shares),
        steady_rank=_steady_rank(shares, lasts, len(steps), step_s),
    )


def steps_of(logs: Sequence[RankLog]) -> list[list[RankStep]]:
    """Return, for each step, the activities and waits of each rank."""
    steps = [list(step) for step in zip(*map(_rank_steps, logs), strict=False)]
    for step in steps:
        meet(step)
    return steps


def meet(step: Sequence[RankStep]) -> None:
    """Record what each rank of a step waited for in each exchange, and the time of the exchange itself."""
    if len({tuple((one.kind, one.name) for one in rank.meetings) for rank in step}) > 1:
        for rank in step:  # the ranks' exchanges cannot be matched
            for one in rank.meetings:
                rank.exposed[one.kind] += one.bare_ns
        return
    for together in zip(*(rank.meetings for rank in step), strict=True):
        _meet(step, together)


def drawn(logs: Sequence[RankLog]) -> list[tuple[int, str, float, float]]:
    """Return a step of about median length as rows: rank, activity, start and duration in seconds."""
    ends = [log.step_ends_ns for log in logs]
    lengths = [later - earlier for earlier, later in pairwise(ends[0])][: min(len(each) for each in ends) - 1]
    number = min(range(len(lengths)), key=lambda step: abs(lengths[step] - median(lengths)))
    first = min(each[number] for each in ends)
    return [
        (rank, "communication" if meets else _DRAWN.get(kind, "other"), (start_ns - first) * 1e-9, (end_ns - start_ns) * 1e-9)
        for rank, log in enumerate(logs)
        for kind, start_ns, end_ns, meets in spans_of(log)
        if ends[rank][number] <= start_ns and end_ns <= ends[rank][number + 1]
    ]


_DRAWN = {"forward": "forward", "backward": "backward", "optimizer": "update", "input": "input"}


def _meet(step: Sequence[RankStep], together: Sequence[Meeting]) -> None:
    """Record one exchange.

    If several ranks begin about last, those that have waited before in this step were delayed by another rank:
    the one that has waited least is the last. A rank that ends before the last begins, such as the root of a
    broadcast, does not wait.
    """
    arrived_ns = max(one.start_ns for one in together)
    about_ns = _ABOUT * max(arrived_ns - one.start_ns for one in together)
    late = [rank for rank, one in enumerate(together) if arrived_ns - one.start_ns <= about_ns]
    last = min(late, key=lambda rank: sum(step[rank].waited.values()))
    why = _excess(together, last)
    for rank, one in enumerate(together):
        waits = rank != last and one.end_ns >= arrived_ns
        waited_ns = max(0, arrived_ns - max(one.start_ns, one.end_ns - one.bare_ns)) if waits else 0
        step[rank].exposed[one.kind] += one.bare_ns - waited_ns
        for kind, share in why.items():
            if kind in EXCHANGES:
                step[rank].exposed[kind] += waited_ns * share
            elif waited_ns > 0:
                step[rank].waited[last, kind] += waited_ns * share


def _excess(together: Sequence[Meeting], last: int) -> dict[Kind, float]:
    """Return shares, adding up to 1, of what the last rank did more of than the others.

    An exchange is among these if the previous exchange ended later on this rank.
    """
    others = [meeting for rank, meeting in enumerate(together) if rank != last]
    if not others:
        return {together[last].kind: 1.0}
    own = together[last]
    more: dict[Kind, float] = {}
    for kind in own.since.keys() | {kind for each in others for kind in each.since}:
        more[kind] = own.since.get(kind, 0) - math.fsum(each.since.get(kind, 0) for each in others) / len(others)
    more[own.kind] = own.before_ns - math.fsum(each.before_ns for each in others) / len(others)
    total = math.fsum(ns for ns in more.values() if ns > 0)
    return {kind: ns / total for kind, ns in more.items() if ns > 0} if total > 0 else {own.kind: 1.0}


def _rank_steps(log: RankLog) -> list[RankStep]:
    ends = log.step_ends_ns
    steps = [RankStep() for _ in range(log.num_steps)]
    number, since, before_ns = 0, defaultdict[Kind, int](int), ends[0] if ends else 0
    for span in spans_of(log):
        while number < len(steps) and span.start_ns >= ends[number + 1]:
            number += 1
        if number == len(steps):
            break
        if span.meets:
            took_ns = span.end_ns - span.start_ns
            steps[number].meetings.append(Meeting(span.kind, span.start_ns, span.end_ns, dict(since), before_ns, took_ns))
            since, before_ns = defaultdict(int), span.end_ns
        else:
            steps[number].own[span.kind] += span.end_ns - span.start_ns
            since[span.kind] += span.end_ns - span.start_ns
    return steps


def spans_of(log: RankLog) -> Iterator[Span]:
    """Yield the rank's spans, in order, from the start of its first step to the end of its last one."""
    if not log.num_steps:
        return
    now, end = log.step_ends_ns[0], log.step_ends_ns[-1]
    stack: list[Event] = []

    def until(time_ns: int) -> Iterator[Span]:
        nonlocal now
        while stack and stack[-1].end_ns <= time_ns:
            yield from _span(stack[-1].kind, now, stack[-1].end_ns)
            now = max(now, stack.pop().end_ns)
        yield from _span(stack[-1].kind if stack else "loop", now, time_ns)
        now = max(now, time_ns)

    def _span(kind: Kind, start_ns: int, end_ns: int) -> Iterator[Span]:
        """Cut a span where steps end, because a step may end inside an event."""
        bounds = [start_ns, *(at for at in log.step_ends_ns if start_ns < at < end_ns), end_ns]
        for first, second in pairwise(bounds):
            if second > first:
                yield Span(kind, first, second, kind in EXCHANGES)

    for event in sorted(_split(log), key=lambda event: (event.start_ns, -event.end_ns)):
        if event.end_ns > now and event.start_ns < end:
            yield from until(max(now, event.start_ns))
            stack.append(event)
    yield from until(end)


def _split(log: RankLog) -> Iterator[Event]:
    """Yield the events. A backward that exchanges gradients is split where the last gradient was computed."""
    for event in (Event(cast("Kind", kind), *times) for kind, *times in log.events):
        computed_ns = min(event.computed_ns, event.end_ns)
        if event.kind == "backward" and computed_ns > event.start_ns:
            yield Event("backward", event.start_ns, computed_ns)
            yield Event("gradients", computed_ns, event.end_ns)
        else:
            yield event


def _seldom(log: RankLog, steps: Sequence[RankStep]) -> Mapping[Kind, Seldom]:
    length_ns = median(end - begin for begin, end in pairwise(log.step_ends_ns))
    found: dict[Kind, Seldom] = {}
    for kind in _NOW_AND_THEN:
        times = [step.own.get(kind, 0) + step.exposed.get(kind, 0.0) for step in steps]
        usual = median(times)
        gaps = [later - earlier for earlier, later in pairwise(_long(times, usual + _OUTLIER * length_ns))]
        is_regular = len(gaps) >= _LEAST_GAPS and sum(gap == median(gaps) for gap in gaps) >= _REGULAR * len(gaps)
        least = _OUTLIER if is_regular or kind in ("save", "evaluate") else _STALL
        long = _long(times, usual + least * length_ns)
        if long and len(long) <= _SELDOM * len(steps):
            period = round(median(later - earlier for earlier, later in pairwise(long))) if len(long) > 1 else len(steps)
            found[kind] = Seldom(usual, period, frozenset(long))
    return found


def _long(times: Sequence[float], limit: float) -> list[int]:
    return [number for number, ns in enumerate(times) if ns > limit]


def _parts(
    step: RankStep, rank: int, number: int, seldom: Sequence[Mapping[Kind, Seldom]]
) -> Iterator[tuple[tuple[Kind, int | None, int | None], float]]:
    """Yield the ns of a rank's step by kind, rank that it waits for, and period of occasional work."""

    def rare(who: int, kind: Kind) -> Seldom | None:
        found = seldom[who].get(kind) if seldom else None
        return found if found is not None and number in found.steps else None

    for times in (step.own, step.exposed):
        for kind, ns in times.items():
            occasional = rare(rank, kind)
            more = 0.0 if occasional is None else max(0.0, ns - occasional.usual_ns)
            yield (kind, None, None), ns - more
            if occasional is not None and more:
                yield (kind, None, occasional.period), more
    for (late, kind), ns in step.waited.items():
        occasional = rare(late, kind)
        yield (kind, late, None if occasional is None else occasional.period), ns


def _steady_rank(shares: Sequence[Share], lasts: Counter[int], num_steps: int, step_s: float) -> int | None:
    """Return the rank that is slower than the others in most steps, or None.

    ``lasts``: number of steps in which each rank waited least.
    """
    waits: Counter[int] = Counter()
    for share in shares:
        if share.rank is not None and share.period is None:
            waits[share.rank] += share.seconds  # type: ignore[assignment]  # seconds
    if not waits:
        return None
    rank, waited_s = waits.most_common(1)[0]
    is_most = waited_s >= _STEADY * sum(waits.values()) and lasts[rank] >= _STEADY * num_steps
    return rank if is_most and waited_s >= _MOST_LATE * step_s else None
