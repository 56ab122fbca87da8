"""Costs of training beside its layers, from short runs of the strategies themselves. All durations are seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetbench.cluster import Link
from fleetbench.fitting.lines import Hockney, fit_line
from fleetbench.fitting.overlap import Exchange, Overlapped, Slowdowns, fit_slowdowns, fit_together
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.build import Plan
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Communication
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.result import RunResult
from real.profile.reading import Floats, closing, collective_times, counted, exchanges, start_times, typical, typical_s
from real.profile.tables import scaled

_WEIGHT_OF_ALL = 4.0
"""Of the point of all gradients, as a multiple of the others' together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """What starting a bucket on its way takes from compute."""

    per_collective_s: float
    pack_s: float
    """Copying all gradients together."""

    def of(self, plan: Plan) -> tuple[float, ...]:
        """What each bucket's start takes."""
        total = sum(bucket.nbytes for bucket in plan.buckets if not bucket.sparse) or 1
        return tuple(self.per_collective_s + (0.0 if bucket.sparse else self.pack_s * bucket.nbytes / total) for bucket in plan.buckets)


def points_of(whole: RunResult, averaged: RunResult) -> tuple[CollectivePoint, ...]:
    """What all-reduces took in the loop: of every gradient by itself, in a queue, and of all of them in one bucket."""
    sizes = {bucket.id: bucket.nbytes for bucket in averaged.plan.buckets}
    times = collective_times(averaged)
    found = [_point(sizes[bucket], times[bucket]) for bucket in sorted(times, key=sizes.__getitem__)]
    dense = [bucket for bucket in whole.plan.buckets if not bucket.sparse]
    if len(dense) == 1:
        found.append(_point(dense[0].nbytes, exchanges(whole)))
    return tuple(found)


def _point(nbytes: int, took_s: Floats) -> CollectivePoint:
    return CollectivePoint(
        nbytes=Bytes(nbytes),
        took=Nanoseconds(round(typical(took_s) * 1e9)),
        mad=Nanoseconds(round(float(np.median(np.abs(took_s - np.median(took_s)))) * 1e9)),
    )


def fit_points(points: Iterable[CollectivePoint], trainers: int) -> Hockney:
    """The link. Most of the weight lies on the largest point, that of all gradients together: there a default bucket is."""
    known = list(points)
    largest = max(range(len(known)), key=lambda index: known[index].nbytes, default=0)
    weights = [_WEIGHT_OF_ALL * max(1, len(known) - 1) if index == largest else 1.0 for index in range(len(known))]
    line = fit_line([float(point.nbytes) for point in known], [point.took * 1e-9 for point in known], weights)
    return Hockney(trainers=trainers, line=line)


def communication_of(
    points: tuple[CollectivePoint, ...],
    hockney: Hockney,
    backend: str,
    in_flight: tuple[Link, ...],
    *,
    between_nodes: bool,
    quantise: Nanoseconds = Nanoseconds(0),
) -> Communication:
    """As a profile keeps it."""
    return Communication(
        backend=backend,
        trainers=hockney.trainers,
        link=hockney.link,
        between="nodes" if between_nodes else "trainers",
        points=points,
        largest_residual=round(hockney.line.largest_residual, 4),
        in_flight=in_flight,
        quantise=quantise,
    )


def quantising(run: RunResult, hockney: Hockney) -> Nanoseconds:
    """What sending 10^6 bytes in INT8 takes beyond their way over the link: quantising, adding up, and coming back."""
    nbytes = sum(operation.nbytes for chain in run.plan.of_bucket.values() for operation in chain)
    beyond_s = typical(exchanges(run, closing(run))) - len(run.plan.buckets) * hockney.line.intercept - hockney.line.slope * nbytes
    return Nanoseconds(max(0, round(beyond_s * 1e15 / nbytes)))


def starts_of(whole: RunResult, several: RunResult) -> Starts:
    """Regression of what starting a bucket took on its size: once all gradients in one, once in several."""
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
    """By how much compute and collectives slow each other, from a run in which several buckets travel beside the backward."""
    ready = {gradient.name: gradient.ready * 1e-9 for layer in table.layers for gradient in layer.gradients}
    buckets = several.plan.buckets
    exchange = Exchange(
        ready_s=tuple(max(ready[name] for name in bucket.gradients) for bucket in buckets),
        nbytes=tuple(bucket.nbytes for bucket in buckets),
        backward_s=table.backward_ns * 1e-9,
        start_s=starts.of(several.plan),
        alpha_s=hockney.line.intercept,
        beta_s=hockney.line.slope,
    )
    drift = typical_s(several, "forward_s") / (table.forward_ns * 1e-9) if table.forward_ns else 1.0  # nothing travels beside a forward
    measured = Overlapped(backward_s=typical_s(several, "backward_s") / drift, stall_s=typical(exchanges(several)) / drift)
    return fit_slowdowns(exchange, measured)


def link_of_two(two: RunResult, hockney: Hockney) -> tuple[Link, ...]:
    """The link as each of two collectives in flight sees it, never faster than alone; nothing where two never are."""
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
    together = fit_together(queues, hockney.line.intercept, took_s, depth)
    latency, bandwidth = alone.latency * 2 / together.latency, alone.bandwidth * together.transfer / 2
    return (
        Link(
            latency=Nanoseconds(max(alone.latency, round(latency))),
            bandwidth=BitsPerSecond(min(alone.bandwidth, max(1, round(bandwidth)))),
        ),
    )


def settled(table: LayerTable, whole: RunResult) -> LayerTable:
    """The table with the forward, backward, update and loop of a run in which all gradients travel beside compute.

    The copying of gradients that ends its backward is no layer's. Where processes make batches, the loop also waits for
    them, by how much depends on the step; its own work is then what it was between the layers' steps.
    """
    start_s = sum(typical(times) for times in start_times(whole).values())
    forward, backward = typical_s(whole, "forward_s"), typical_s(whole, "backward_s") - start_s
    table = scaled(table, forward * 1e9 / max(1, table.forward_ns), max(0.0, backward) * 1e9 / max(1, table.backward_ns))
    update, other = (Nanoseconds(round(typical_s(whole, name) * 1e9)) for name in ("update_s", "other_s"))
    return dataclasses.replace(table, update=update, read=table.read if table.loaders else other)


def with_averaging(table: LayerTable, averaged: RunResult) -> LayerTable:
    """The table with a local step's update, and with what an averaging adds to it: packing deltas and applying their mean.

    Starting the averaging's collectives is in the table already.
    """
    steps = counted(averaged)
    local = typical(steps.loc[steps["local_steps"].isna(), "update_s"].to_numpy())
    both = typical(closing(averaged)["update_s"].to_numpy())
    rounds = 2 if averaged.experiment.strategy.averages_state else 1
    starts = rounds * len(averaged.plan.buckets) * table.host_per_collective
    return dataclasses.replace(
        table,
        local_update=Nanoseconds(max(0, round(local * 1e9))),
        merge=Nanoseconds(max(0, round((both - local) * 1e9) - starts)),
    )
