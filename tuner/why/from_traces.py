"""Causes of slow steps from traces of torch.profiler: what a device did, and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetbench.quantities import counted
from fleetbench.units import milliseconds
from fleetbench.why.shares import Kind, Share, Shares
from fleetbench.why.traces import TraceShares, projected, read_shares
from tuner.why.causes import LEAST_SHARE, NETWORK, SLOW, Cause
from tuner.why.explanation import Explanation

_MORE: dict[Kind, str] = {
    "input": "waits longer for its batches",
    "device": "computes longer",
    "optimizer": "updates longer",
    "idle": "leaves its device idle for longer",
    "loop": "runs the script's own code for longer",
}
_LEAST_IDLE = 0.05
"""Smallest share of a step at which gaps between kernels are a cause."""


def explain_traces(sources: Sequence[Path], where: str, *, link: float | None = None, ranks: int | None = None) -> Explanation:
    """Explain the steps in traces of torch.profiler.

    A note gives the step time with links ``link`` times as fast, or with ``ranks`` ranks. Raises
    ``ConfigError`` for files that are no traces, or whose steps cannot be determined.
    """
    began = time.monotonic()
    found = read_shares(sources, where)
    notes = list(found.shares.notes)
    if link is not None or ranks is not None:
        other = projected(found, link_factor=link, ranks=ranks)
        what = [*([f"links {link:g} times as fast"] if link is not None else []), *([counted(ranks, "rank")] if ranks is not None else [])]
        notes.append(f"with {' and '.join(what)} a step takes {milliseconds(other.step_s)} ms, {other.notes[-1]}")
    return Explanation(
        command=", ".join(map(str, sources)),
        ranks=found.num_ranks,
        hosts=None,
        device="as traced",
        shares=found.shares,
        alone_s=None,
        causes=tuple(sorted(causes_of_traces(found), key=lambda cause: -cause.seconds)),
        all_s=None,
        foreign_cores=None,
        seconds=time.monotonic() - began,
        notes=tuple(notes),
    )


def causes_of_traces(found: TraceShares) -> Iterator[Cause]:
    """Yield the causes that the shares of a traced step show."""
    shares = found.shares
    least = LEAST_SHARE * shares.step_s
    for rank in sorted({share.rank for share in shares.shares if share.rank is not None}):
        waits = tuple(share for share in shares.shares if share.rank == rank)
        if _sum(waits) >= least:
            kind = max(waits, key=lambda share: share.seconds).kind
            what = f"rank {rank} {_MORE.get(kind, 'takes longer')} than the others, which wait {_ms(waits)} ms per step for it"
            yield _cause(SLOW if rank == shares.steady_rank else "ranks wait for each other", what, waits, shares)
    idle = shares.part("idle")
    if _sum(idle) >= _LEAST_IDLE * shares.step_s:
        yield _idle(found, idle)
    inputs = shares.part("input")
    if _sum(inputs) >= least:
        what = f"the device waits {_ms(inputs)} ms per step for batches"
        yield _cause("the loader", what, inputs, shares, "more workers: DataLoader(..., num_workers=N, pin_memory=True)")
    kinds: tuple[tuple[Kind, str], ...] = (("gradients", NETWORK), ("buffers", "buffers"), ("collective", "other collectives"))
    for kind, name in kinds:
        own = shares.part(kind)
        if _sum(own) >= least:
            what = f"{_ms(own)} ms per step of communication are not hidden, and {1e3 * found.hidden_s:.3g} ms are"
            yield _cause(name, what, own, shares, "DistributedDataParallel(..., broadcast_buffers=False)" if kind == "buffers" else "")


def _idle(found: TraceShares, idle: tuple[Share, ...]) -> Cause:
    """Return the cause of idle time on the device: the host waits for it, or launches kernels too late."""
    if found.host_waits and found.host_waits[0].idle_s >= _sum(idle) / 3:
        wait = found.host_waits[0]
        where = f" in {wait.caller}" if wait.caller else ""
        often = f"{wait.per_step:.3g} times per step"
        what = f"{wait.operator}{where} makes the host wait for the device {often}, and then the device for the host"
        return _cause("synchronisation", what, idle, found.shares, "leave it out, or do it in few steps: keep the loss on the device")
    what = f"the device is idle for {_ms(idle)} ms per step because the host launches its kernels too late"
    return _cause("launches", what, idle, found.shares, 'larger batches, or torch.compile(model, mode="reduce-overhead")')


def _cause(name: str, what: str, own: tuple[Share, ...], shares: Shares, remedy: str = "") -> Cause:
    return Cause(name=name, what=what, shares=own, remedy=remedy, simulated_s=shares.step_s - _sum(own))


def _sum(shares: Sequence[Share]) -> float:
    return sum(share.seconds for share in shares)


def _ms(shares: Sequence[Share]) -> str:
    return milliseconds(_sum(shares))
