"""Costs of a training step besides its layers, from the steps and spans of short runs of strategies.

All durations are in seconds. A step's time is the sum of its parts, so each part is a mean over ranks and
steps that leaves out the slowest few percent (``typical``). A median would ignore the slower half, which
makes real steps long.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.cluster import Link
from fleetbench.fitting.lines import Hockney, fit_line
from fleetbench.fitting.overlap import LEAST_TOGETHER, Slowdowns, fit_slowdowns, fit_together
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.build import Plan
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import LayerTable, scaled
from fleetbench.plan.overlap import Exchange, Overlapped
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.result import RunResult, step_times
from fleetbench.timeline import COMMUNICATION, HOST, Span, start_name

Floats = npt.NDArray[np.float64]

_SLOWEST = 0.02
"""Share of the values, the largest, that ``typical`` leaves out."""
_LONGEST_GAP = 0.5
"""Longest gap before a collective that counts as its cost, as a share of its duration. The rest of a longer
gap is a wait for the caller."""


def typical(values: npt.ArrayLike) -> float:
    """Return the mean of all but the largest 2 % of the values; 0 for no values."""
    ordered = np.sort(np.asarray(values, dtype=float).ravel())
    return float(ordered[: len(ordered) - int(_SLOWEST * len(ordered))].mean()) if len(ordered) else 0.0


def counted(result: RunResult) -> pd.DataFrame:
    """Return the rows of ``result.steps`` after the warm-up."""
    return result.steps[result.steps["step"] >= 1]


def closing(result: RunResult) -> pd.DataFrame:
    """Return the rows of steps after the warm-up at whose end trainers averaged."""
    table = counted(result)
    return table[table["local_steps"].notna()]


def typical_s(result: RunResult, column: str) -> float:
    """Return the typical value of a column of the steps after the warm-up, over all ranks."""
    return typical(counted(result)[column].to_numpy())


def compute_times(result: RunResult) -> Floats:
    """Return the seconds of forward plus backward after the warm-up, shape ``(ranks, steps)``."""
    table = counted(result)
    compute = table.assign(compute_s=table["forward_s"] + table["backward_s"]).pivot_table(index="rank", columns="step", values="compute_s")
    return np.asarray(compute.to_numpy(), dtype=float)


def exchanges(result: RunResult, steps: pd.DataFrame | None = None) -> Floats:
    """Return each step's seconds from the arrival of the last rank until the exchange ends on the last rank.

    ``steps`` are rows of ``result.steps``, by default those after the warm-up. The last rank counts because
    it sets the pace: the rank that ends last arrives last at the next exchange. A ring over slow and fast
    links ends earlier on some ranks, by a segment's time, so a mean over ranks would be too short.
    """
    table = counted(result) if steps is None else steps
    return np.asarray(table["exposed_comm_s"].groupby(table["step"]).max().to_numpy(), dtype=float)


def start_times(result: RunResult) -> dict[int, Floats]:
    """Return the host's seconds for each start of a bucket, by bucket id, over all ranks and counted steps."""
    names = {start_name(bucket.id): bucket.id for bucket in result.plan.buckets}
    first = counted(result).groupby("rank")["start_s"].min()
    begin_ns = {int(rank): round(float(start) * 1e9) - 1 for rank, start in first.items()}  # type: ignore[call-overload]  # an index of ints
    kept = [span for span in result.spans if span.stream == HOST and span.start_ns >= begin_ns[span.rank]]
    times = {bucket: np.array([span.duration_ns * 1e-9 for span in kept if span.name == name]) for name, bucket in names.items()}
    return {bucket: took for bucket, took in times.items() if len(took)}


def collective_times(averaged: RunResult) -> dict[int, Floats]:
    """Return the seconds of each bucket's all-reduces, by bucket id, in averagings whose buckets queue.

    A time runs from the end of the previous all-reduce on the same lane to the end of this one, because gaps
    are part of the cost. All-reduces that began before any on the lane had ended are left out: they did not
    queue. If an optimizer's state is averaged after the parameters, only a bucket's first all-reduce counts.
    """
    names = {f"all_reduce {bucket.id}": bucket.id for bucket in averaged.plan.buckets}
    found: dict[int, list[float]] = {}
    for spans in _averagings(averaged):
        for lane in {span.stream for span in spans}:
            of_lane = sorted((span for span in spans if span.stream == lane and span.name in names), key=lambda span: span.start_ns)
            ordered = list({span.name: span for span in reversed(of_lane)}.values())[::-1]
            first_end_ns = min((span.start_ns + span.duration_ns for span in ordered), default=0)
            for before, span in pairwise(ordered):
                if span.start_ns < first_end_ns:
                    continue
                gap_ns = max(0, span.start_ns - before.start_ns - before.duration_ns)
                took_ns = span.duration_ns + min(gap_ns, _LONGEST_GAP * span.duration_ns)
                found.setdefault(names[span.name], []).append(took_ns * 1e-9)
    return {bucket: np.array(times) for bucket, times in found.items()}


def _averagings(result: RunResult) -> list[list[Span]]:
    """Return the collectives of every averaging after the warm-up, one list per rank and step."""
    spans: dict[int, list[Span]] = {}
    for span in result.spans:
        if span.stream.startswith(COMMUNICATION):
            spans.setdefault(span.rank, []).append(span)
    table = closing(result)
    ends = table["start_s"] + step_times(result.steps).loc[table.index]
    return [
        [span for span in spans.get(int(rank), ()) if start_s * 1e9 - 1 <= span.start_ns <= end_s * 1e9 + 1]
        for rank, start_s, end_s in zip(table["rank"], table["start_s"], ends, strict=True)
    ]


_WEIGHT_OF_ALL = 4.0
"""Weight of the point of all gradients in ``fit_points``, as a multiple of that of all other points together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Compute time that starting buckets' collectives costs."""

    per_collective_s: float
    pack_s: float
    """Seconds to copy all dense gradients into buckets."""

    def of(self, plan: Plan) -> tuple[float, ...]:
        """Return the seconds to start each bucket of a plan."""
        total = sum(bucket.nbytes for bucket in plan.buckets if not bucket.sparse) or 1
        return tuple(self.per_collective_s + (0.0 if bucket.sparse else self.pack_s * bucket.nbytes / total) for bucket in plan.buckets)


def points_of(whole: RunResult, averaged: RunResult) -> tuple[CollectivePoint, ...]:
    """Return times of all-reduces: of single gradients (``averaged``), and of all in one bucket (``whole``)."""
    sizes = {bucket.id: bucket.nbytes for bucket in averaged.plan.buckets}
    times = collective_times(averaged)
    found = [_point(sizes[bucket], times[bucket]) for bucket in sorted(times, key=sizes.__getitem__)]
    dense = [bucket for bucket in whole.plan.buckets if not bucket.sparse]
    if len(dense) == 1:
        found.append(_point(dense[0].nbytes, exchanges(whole)))
    return tuple(found)


def points_of_blocks(sharded: RunResult) -> tuple[CollectivePoint, ...]:
    """Return the time of each block's gather plus scatter, as that of an all-reduce of the block's size.

    A collective counts from the arrival of the last rank, that is, on the rank where it was shortest. If the
    scatter also exchanges gradients between replicas, it is assumed to take as long as the gather.
    """
    plan = sharded.plan
    found = []
    for block in sorted(plan.blocks, key=lambda block: block.nbytes):
        gathers, scatters = (_shortest(sharded, f"{kind} {block.bucket}") for kind in ("all_gather", "reduce_scatter"))
        if len(gathers) and len(scatters):
            found.append(_point(block.nbytes, gathers + typical(scatters if plan.shard_ranks == plan.trainers else gathers)))
    return tuple(found)


def _shortest(result: RunResult, name: str) -> Floats:
    """Return the seconds of each collective called ``name`` on the rank where it is shortest."""
    by_rank: dict[int, list[Span]] = {}
    for span in result.spans:
        if span.stream.startswith(COMMUNICATION) and span.name == name:
            by_rank.setdefault(span.rank, []).append(span)
    ordered = [sorted(spans, key=lambda span: span.start_ns) for spans in by_rank.values()]
    return np.array([min(span.duration_ns for span in together) * 1e-9 for together in zip(*ordered, strict=False)])


def _point(nbytes: int, took_s: Floats) -> CollectivePoint:
    return CollectivePoint(
        nbytes=Bytes(nbytes),
        took=Nanoseconds(round(typical(took_s) * 1e9)),
        mad=Nanoseconds(round(float(np.median(np.abs(took_s - np.median(took_s)))) * 1e9)),
    )


def fit_points(points: Iterable[CollectivePoint], trainers: int) -> Hockney:
    """Fit a line to the times of all-reduces by size.

    Most weight is on the largest point, all gradients together, because a default bucket is near that size.
    """
    known = list(points)
    largest = max(range(len(known)), key=lambda index: known[index].nbytes, default=0)
    weights = [_WEIGHT_OF_ALL * max(1, len(known) - 1) if index == largest else 1.0 for index in range(len(known))]
    line = fit_line([float(point.nbytes) for point in known], [point.took * 1e-9 for point in known], weights)
    return Hockney(trainers=trainers, line=line)


def quantising(run: RunResult, hockney: Hockney) -> Nanoseconds:
    """Return the ns per 10^6 bytes sent in INT8 that the link does not explain: quantising, adding, converting back."""
    nbytes = sum(operation.nbytes for chain in run.plan.of_bucket.values() for operation in chain)
    beyond_s = typical(exchanges(run, closing(run))) - len(run.plan.buckets) * hockney.line.intercept - hockney.line.slope * nbytes
    return Nanoseconds(max(0, round(beyond_s * 1e15 / nbytes)))


def starts_of(whole: RunResult, several: RunResult) -> Starts:
    """Fit the time to start a bucket by its size, to the runs with one bucket (``whole``) and with several."""
    sizes: list[float] = []
    took: list[float] = []
    weights: list[float] = []
    for result in (several, whole):
        times = start_times(result)
        dense = [bucket for bucket in result.plan.buckets if not bucket.sparse and bucket.id in times]
        sizes += [float(bucket.nbytes) for bucket in dense]
        took += [typical(times[bucket.id]) for bucket in dense]
        weights += [1.0 / len(dense) for _ in dense]
    line = fit_line(sizes, took, weights)
    total = sum(bucket.nbytes for bucket in whole.plan.buckets if not bucket.sparse)
    return Starts(per_collective_s=line.intercept, pack_s=line.slope * total)


def slowdowns_of(table: LayerTable, several: RunResult, starts: Starts, hockney: Hockney) -> Slowdowns:
    """Return how compute and collectives slow each other, from a run whose buckets overlap the backward."""
    ready = {gradient.name: gradient.ready * 1e-9 for layer in table.layers for gradient in layer.gradients}
    buckets = several.plan.buckets
    exchange = Exchange(
        ready_s=tuple(max(ready[name] for name in bucket.gradients) for bucket in buckets),
        takes_s=tuple(hockney.line.intercept + hockney.line.slope * bucket.nbytes for bucket in buckets),
        backward_s=table.backward_ns * 1e-9,
        start_s=starts.of(several.plan),
    )
    drift = typical_s(several, "forward_s") / (table.forward_ns * 1e-9) if table.forward_ns else 1.0  # no exchange overlaps a forward
    measured = Overlapped(backward_s=typical_s(several, "backward_s") / drift, stall_s=typical(exchanges(several)) / drift)
    return fit_slowdowns(exchange, measured)


def link_of_two(two: RunResult, hockney: Hockney) -> tuple[Link, ...]:
    """Return the link of each of two simultaneous collectives, as a tuple of one; empty if there never are two.

    The link is never faster than that of one collective.
    """
    alone = hockney.link
    lanes: dict[int, list[Bucket]] = {}
    for bucket in two.plan.buckets:
        for operation in two.plan.of_bucket.get(bucket.id, ()):
            lanes.setdefault(operation.communicator, []).append(bucket)
    depth = two.plan.queue_depth
    times = {bucket: typical(took) for bucket, took in collective_times(two).items()}
    if sum(min(depth, len(lane)) for lane in lanes.values()) < 2 or not times:  # two in flight
        return ()
    queues = [[hockney.line.slope * bucket.nbytes for bucket in lane] for lane in lanes.values()]
    took_s = [[times.get(bucket.id) for bucket in lane] for lane in lanes.values()]
    ends = [[(span.start_ns, span.start_ns + span.duration_ns) for span in spans] for spans in _averagings(two) if spans]
    whole_s = typical([(max(end for _, end in found) - min(start for start, _ in found)) * 1e-9 for found in ends])
    messages = 2 * (two.experiment.cluster.trainers - 1)
    together = fit_together(queues, hockney.line.intercept, took_s, depth, messages, whole_s)
    latency, bandwidth = alone.latency * 2 / together.latency, alone.bandwidth * together.transfer / 2
    return (
        Link(
            latency=Nanoseconds(max(alone.latency, round(latency))),
            bandwidth=BitsPerSecond(min(alone.bandwidth, max(1, round(bandwidth)))),
        ),
    )


def sharing_notes(in_flight: Sequence[Link], alone: Link) -> list[str]:
    """Return a note for each link whose bandwidth is at the lower limit of the fit in ``link_of_two``."""
    least = LEAST_TOGETHER / 2
    what = f"two in flight took longer than the fit allows for: each is said to have {least:g} of the bandwidth, which is its limit"
    return [f"the link: {what}; profile again" for each in in_flight if each.bandwidth < 1.05 * least * alone.bandwidth]


def settled(table: LayerTable, whole: RunResult) -> LayerTable:
    """Return the table with the forward, backward, update and loop times of the run ``whole``.

    The time to start buckets at the end of the backward is subtracted, because it belongs to no layer. If
    threads load batches, the run's loop also waits for them, so the loop's own work stays that of the leg
    ``layers``.
    """
    start_s = sum(typical(times) for times in start_times(whole).values())
    forward, backward = typical_s(whole, "forward_s"), typical_s(whole, "backward_s") - start_s
    table = scaled(table, forward * 1e9 / max(1, table.forward_ns), max(0.0, backward) * 1e9 / max(1, table.backward_ns))
    update, other = (Nanoseconds(round(typical_s(whole, name) * 1e9)) for name in ("update_s", "other_s"))
    return dataclasses.replace(table, update=update, read=table.read if table.loaders else other)


def with_averaging(table: LayerTable, averaged: RunResult) -> LayerTable:
    """Return the table with a local step's compute and update, and the time to pack and apply mean deltas.

    The time to start the averaging's collectives is not included: the table has it already.
    """
    share, excess_s = _local_compute(averaged, (table.forward_ns + table.backward_ns) * 1e-9)
    steps = counted(averaged)
    local = typical(steps.loc[steps["local_steps"].isna(), "update_s"].to_numpy())
    both = typical(closing(averaged)["update_s"].to_numpy())
    rounds = 2 if averaged.experiment.strategy.averages_state else 1
    starts = rounds * len(averaged.plan.buckets) * table.host_per_collective
    return dataclasses.replace(
        table,
        local_update=Nanoseconds(max(0, round(local * 1e9))),
        local_compute=share,
        resume=Nanoseconds(round(excess_s * 1e9)),
        merge=Nanoseconds(max(0, round((both - local) * 1e9) - starts)),
    )


_FEWEST_ROUNDS = 3


def _local_compute(averaged: RunResult, synchronous_s: float) -> tuple[float, float]:
    """Return a local step's compute as a share of a synchronous step's, at most 1, and a round's extra seconds.

    The share is that of the steps in a round's later half. The steps of the earlier half take the extra
    seconds, because a core that has waited for the averaging computes more slowly for some steps. Returns 1
    and 0 if there are too few whole rounds, or if the first step is not longer than those of the later half
    by at least two standard errors over rounds.
    """
    k_steps = averaged.experiment.strategy.localsgd_configs.k_steps
    steps = averaged.steps.sort_values(["rank", "step"])
    closed = steps["local_steps"].notna().groupby(steps["rank"]).shift(fill_value=False).groupby(steps["rank"]).cumsum()
    position = steps.groupby(["rank", closed]).cumcount()
    table = steps.assign(round=closed, position=position, compute_s=steps["forward_s"] + steps["backward_s"])[steps["step"] >= 1]
    rounds = table.pivot_table(index=["rank", "round"], columns="position", values="compute_s").reindex(columns=range(k_steps)).dropna()
    compute_s = rounds.to_numpy()
    if len(compute_s) < _FEWEST_ROUNDS or synchronous_s <= 0.0 or not (compute_s > 0.0).all():
        return 1.0, 0.0
    half = k_steps // 2
    logs = np.log(compute_s[:, half:].mean(axis=1) / compute_s[:, 0])
    if logs.mean() + 2.0 * logs.std(ddof=1) / math.sqrt(len(logs)) >= 0.0:
        return 1.0, 0.0
    of_position = [typical(column) for column in compute_s.T]
    local_s = float(np.mean(of_position[half:]))
    return min(1.0, round(local_s / synchronous_s, 4)), max(0.0, sum(of_position[:half]) - half * local_s)
