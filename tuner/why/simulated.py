"""Remedies, simulated from the job's own measurements: compute, readiness of gradients, buckets and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetbench.cluster import Cluster, Link, Measured
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import CollectivePoint
from fleetbench.plan.layers import DTYPE_BYTES
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.stragglers import SlowRank
from fleetbench.strategy import DistributedStrategy
from fleetbench.why.buckets import DdpBucket, buckets_of
from fleetbench.why.links import Links
from fleetbench.why.observed import Readiness
from fleetbench.why.shares import EXCHANGES, Share, total_s
from fleetbench.workload import HostWork, LayerSpec, Workload
from sim.run import simulate
from tuner.why.causes import Cause, Seen

LARGEST_ERROR = 0.25
"""Largest relative error of the simulated unchanged step. With a larger one, remedies are not simulated."""
_STEPS = 20


class Simulated:
    """Simulated steps of the job, relative to the simulated unchanged step.

    A step consists of what the simulator executes (compute, buckets, buffers, a slow rank, the loop's own
    work) and of what the simulator does not: occasional work, the script's own collectives, waits for a
    slowest rank that changes from step to step. Compute takes as long as in observed steps.
    """

    def __init__(self, seen: Seen, ready: Readiness, links: Links) -> None:
        self._seen, self._links, self._model = seen, links, seen.model
        self._compute_ns = round(1e9 * seen.shares.of("forward", "backward"))
        faster = min(1.0, self._compute_ns / max(1, *ready.ready_ns))
        self._ready = replace(ready, ready_ns=tuple(round(faster * ns) for ns in ready.ready_ns))
        self._steady = seen.shares.steady_rank
        self._today_s = self._total_s(())

    @property
    def error(self) -> float:
        """Relative error of the simulated unchanged step."""
        return self._today_s / self._seen.shares.step_s - 1.0

    def step_s(self, causes: Sequence[Cause], cap_mb: float | None = None) -> float:
        """Return seconds per step with these causes' remedies, and a bucket cap."""
        return max(0.0, self._seen.shares.step_s - self._today_s + self._total_s(causes, cap_mb))

    def best_cap(self, caps: Sequence[float]) -> tuple[float, float]:
        """Return the bucket cap in MiB with the shortest steps, and their seconds."""
        return min(((cap, self.step_s((), cap)) for cap in caps), key=lambda found: found[1])

    def _total_s(self, causes: Sequence[Cause], cap_mb: float | None = None) -> float:
        spared = {share for cause in causes if cause.spares for share in cause.shares}
        faster = max((cause.interface or 1.0 for cause in causes), default=1.0)
        left = [share for share in self._seen.shares.shares if share not in spared]
        beside = sum(share.seconds for share in left if not self._is_executed(share))
        cap_mb = next((c.change.bucket_cap_mb for c in causes if c.change is not None and c.change.bucket_cap_mb is not None), cap_mb)
        experiment = self._experiment(left, faster, cap_mb)
        return beside + simulate(experiment, timeline=False, table=False).summary.step_s["mean"]

    def _is_executed(self, share: Share) -> bool:
        """Whether the simulated step contains this share."""
        if share.rank is not None:
            return share.period is None and share.rank == self._steady
        return share.period is None and share.kind not in ("collective", "evaluate", "save")

    def _experiment(self, left: Sequence[Share], faster: float, cap_mb: float | None) -> Experiment:
        ready, seen = self._ready, self._seen
        cap = self._model.bucket_cap_mb if cap_mb is None else cap_mb
        buckets = buckets_of(ready, cap)
        own = {kind: sum(s.seconds for s in left if s.kind == kind and s.rank is None and s.period is None) for kind in _HOST}
        waited = sum(share.seconds for share in left if share.rank is not None and self._is_executed(share))
        slow = (
            (SlowRank(ranks=(self._steady,), factor=1.0 + waited * 1e9 / self._compute_ns),)
            if self._steady is not None and waited > 0
            else ()
        )
        broadcasts = any(share.kind == "buffers" for share in left)
        ns = {kind: Nanoseconds(round(seconds * 1e9)) for kind, seconds in own.items()}
        host = HostWork(read=Nanoseconds(ns["input"] + ns["loop"] + ns["unused"]), update=ns["optimizer"])
        return Experiment(
            name="why",
            workload=Workload(
                model="layers",
                layers=_layers(self._compute_ns - max(ready.ready_ns), buckets, self._model.buffers_nbytes if broadcasts else 0),
                host=host,
                steps=_STEPS,
                batch_size=1,
                dtype="float32",
            ),
            cluster=_cluster(seen, self._links, faster, slow),
            strategy=DistributedStrategy(fuse_all_reduce_ops=False, sync_nccl_allreduce=False, broadcast_buffers=broadcasts),
        )


class Additive:
    """Steps of ``fully_shard`` without CUDA streams: no exchange overlaps compute, so shares add up."""

    def __init__(self, seen: Seen) -> None:
        self._shares = seen.shares

    def step_s(self, causes: Sequence[Cause]) -> float:
        """Return the seconds per step with the remedies of ``causes``."""
        spared = {share for cause in causes if cause.spares for share in cause.shares}
        faster = max((cause.interface or 1.0 for cause in causes), default=1.0)
        exchanges = [share for share in self._shares.shares if share.kind in EXCHANGES and share.rank is None and share not in spared]
        return self._shares.step_s - total_s(spared) - total_s(exchanges) * (1 - 1 / faster)


_HOST = ("input", "loop", "unused", "optimizer")


def _layers(forward_ns: int, buckets: Sequence[DdpBucket], buffers_nbytes: int) -> tuple[LayerSpec, ...]:
    """Return one layer per bucket; the layer's backward ends when the bucket is ready.

    The bucket that is ready first belongs to the last layer.
    """
    before_ns, layers = 0, []
    for number, bucket in enumerate(buckets):
        layers.append(
            LayerSpec(
                name=f"bucket{number}",
                params=max(1, bucket.nbytes // DTYPE_BYTES["float32"]),
                forward=Nanoseconds(forward_ns // len(buckets)),
                backward=Nanoseconds(max(0, bucket.ready_ns - before_ns)),
                buffers=Bytes(0 if number else buffers_nbytes),
            )
        )
        before_ns = max(before_ns, bucket.ready_ns)
    return tuple(reversed(layers))


def _cluster(seen: Seen, links: Links, faster: float, slow: tuple[SlowRank, ...]) -> Cluster:
    """Return a cluster with the job's ranks, and with their measured all-reduces ``faster`` times as fast."""
    ranks, nodes = len(seen.logs), len(links.hosts)
    is_even = ranks % nodes == 0
    points = tuple(
        CollectivePoint(nbytes=Bytes(one.size_bytes), took=Nanoseconds(round(one.median_s * 1e9 / faster))) for one in links.times
    )
    fit = links.fit or Link(bandwidth=BitsPerSecond(max(1, round(8 * links.busbw_bytes_per_s))))
    link = Link(bandwidth=BitsPerSecond(max(1, round(fit.bandwidth * faster))), latency=fit.latency, payload=True)
    return Cluster(
        nodes=nodes if is_even else 1,
        trainers_per_node=ranks // nodes if is_even else ranks,
        intra=link,
        inter=link,
        collective="measured" if ranks > 1 else "ring",
        measured=(Measured(trainers=ranks, points=points),) if ranks > 1 else (),
        stragglers=slow,
    )


def simulated_of(seen: Seen) -> Simulated | Additive | None:
    """Return what simulates the job's steps.

    Return None if too little is known, or if the unchanged step is off by more than ``LARGEST_ERROR``.
    """
    if seen.model.gathered_nbytes:
        return Additive(seen)
    if seen.ready is None or seen.links is None or not seen.ready.names:
        return None
    try:
        found = Simulated(seen, seen.ready, seen.links)
    except ConfigError:  # such as times of zero
        return None
    return found if abs(found.error) <= LARGEST_ERROR else None
