"""Causes of slow steps from traces of torch.profiler: what a device did, and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetbench.quantities import counted
from fleetbench.units import milliseconds
from fleetbench.why.shares import Kind, Share, total_s
from fleetbench.why.traces import TraceShares, projected, read_shares
from tuner.why.causes import DOING, LEAST_SHARE, NETWORK, SLOW, Cause
from tuner.why.explanation import Explanation

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
        causes=tuple(sorted(causes_of_traces(found), key=lambda cause: -cause.seconds)),
        all_s=None,
        seconds=time.monotonic() - began,
        notes=tuple(notes),
    )


def causes_of_traces(found: TraceShares) -> Iterator[Cause]:
    """Yield the causes that the shares of a traced step show."""
    shares = found.shares

    def cause(name: str, what: str, own: Sequence[Share], remedy: str = "", least: float = LEAST_SHARE) -> Iterator[Cause]:
        if total_s(own) >= least * shares.step_s:
            yield Cause(name=name, what=what, shares=tuple(own), remedy=remedy, simulated_s=shares.step_s - total_s(own))

    for rank in sorted({share.rank for share in shares.shares if share.rank is not None}):
        waits = [share for share in shares.shares if share.rank == rank]
        kind = max(waits, key=lambda share: share.seconds).kind
        what = f"rank {rank} {DOING[kind]} for longer than the others, which wait {_ms(waits)} ms per step for it"
        yield from cause(SLOW if rank == shares.steady_rank else "ranks wait for each other", what, waits)
    idle, wait = shares.part("idle"), next(iter(found.host_waits), None)
    if wait is not None and wait.idle_s >= total_s(idle) / 3:
        where = f" in {wait.caller}" if wait.caller else ""
        often = f"{wait.per_step:.3g} times per step"
        what = f"{wait.operator}{where} makes the host wait for the device {often}, and then the device for the host"
        remedy = "leave it out, or do it in few steps: keep the loss on the device"
        yield from cause("synchronisation", what, idle, remedy, _LEAST_IDLE)
    else:
        what = f"the device is idle for {_ms(idle)} ms per step between its kernels"
        yield from cause("launches", what, idle, 'larger batches, or torch.compile(model, mode="reduce-overhead")', _LEAST_IDLE)
    inputs = shares.part("input")
    remedy = "more workers: DataLoader(..., num_workers=N, pin_memory=True)"
    yield from cause("the loader", f"the device waits {_ms(inputs)} ms per step for batches", inputs, remedy)
    kinds: tuple[tuple[Kind, str, str], ...] = (
        ("gradients", NETWORK, ""),
        ("buffers", "buffers", "DistributedDataParallel(..., broadcast_buffers=False)"),
        ("collective", "other collectives", ""),
    )
    for kind, name, remedy in kinds:
        own = shares.part(kind)
        what = f"{_ms(own)} ms per step of communication are not hidden, and {1e3 * found.hidden_s:.3g} ms are"
        yield from cause(name, what, own, remedy)


def _ms(shares: Sequence[Share]) -> str:
    return milliseconds(total_s(shares))
