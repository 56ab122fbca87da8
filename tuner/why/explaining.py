"""Explaining: observes a command's ranks, and names what makes their steps long and what would help."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fleetbench.config import decode
from fleetbench.errors import FleetbenchError
from fleetbench.experiment import Run
from fleetbench.measurements import is_busy
from fleetbench.why.change import DdpChange
from fleetbench.why.links import Links
from fleetbench.why.nccl_log import read_nccl_log
from fleetbench.why.observed import RankLog, Readiness
from fleetbench.why.steps import drawn, shares_of
from fleetbench.why.traces import TraceShares, read_shares
from real.processes.roles import TUNING
from real.testbed.noise import watching
from real.why.job import LookedAt
from real.why.look import Look
from tuner.pytorch import in_words_of
from tuner.why.causes import LEAST_SHARE, NETWORK, Cause, Seen, causes_of, gain_s, ranked
from tuner.why.explanation import Explanation
from tuner.why.from_traces import causes_of_traces
from tuner.why.simulated import LARGEST_ERROR, Additive, Simulated, simulated_of
from tuner.why.trials import try_change

_STEPS, _WATCHED = 400, 0.2
"""Largest number of observed steps, and approximate share of ``seconds`` spent on observing them."""
_READY, _READY_S = 100, 3.0
"""Largest number of steps in which the readiness of gradients is observed, and approximate seconds for them."""
_TRACED = 6
"""Number of steps that torch.profiler records."""
_WARMUP = 5
BUCKETS = "the buckets"
"""Name of the cause that another bucket size remedies."""
_CAPS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0)
"""Bucket caps that are simulated, in MiB."""
_GAIN = 0.02
"""Smallest gain, as a share of a step, for which a remedy is recommended."""
_HIDDEN = 0.4
"""Share of the exposed exchange that other buckets must hide to be the remedy, instead of the network."""
_TRIES = 3
"""Largest number of remedies that are tried in the running script."""

Progress = Callable[[str, int, int], None]


def explain(
    command: Sequence[str],
    run: Run,
    *,
    seconds: float = 60.0,
    traces: bool | None = None,
    workdir: Path | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Start the command, explain its steps, and stop it.

    ``seconds``: approximate duration of all this. ``traces``: whether to record some steps with
    torch.profiler and use their shares, because a host's times do not show what its device does; default: on
    GPUs only. Raises ``ConfigError`` if nothing trains that could be observed, and ``LegFailed`` with the
    rank that fails.
    """
    began, tell, notes = time.monotonic(), progress or (lambda *_: None), list[str]()
    with LookedAt(command, run, workdir) as job:
        with watching(f"{TUNING}={job.folder}") as load:
            watch = Look(steps=_STEPS, warmup_steps=_WARMUP, max_s=_WATCHED * seconds, links=True)
            parts = job.look(watch, lambda *at: tell("watch", *at))
        logs = tuple(RankLog.of(part["log"]) for part in parts if part["log"] is not None)
        seen, traced = Seen(logs=logs, shares=shares_of(logs)), None
        notes += _notes(logs[0], load.cores)
        if not job.is_over:
            seen = replace(seen, links=decode(parts[0]["links"], Links, "links"), transports=read_nccl_log(job.output))
            if traces if traces is not None else logs[0].device == "cuda":
                traced = _traced(job)
        if traced is not None:
            seen = replace(seen, shares=traced.shares)
            notes += traced.shares.notes
        elif not (job.is_over or logs[0].wrapper == "fleet" or seen.model.gathered_nbytes):
            seen = replace(seen, ready=_readiness(job, tell))
        if job.is_over:
            notes.append("the script ended by itself, so that not all was measured, and no remedy was tried")
        simulated = simulated_of(seen) if traced is None else None
        if simulated is None and seen.ready is not None:
            notes.append(f"no remedy is simulated: the simulator misses the time of this step by more than {100 * LARGEST_ERROR:.0f} %")
        causes = [_simulate(cause, seen, simulated) for cause in causes_of(seen)] if traced is None else list(causes_of_traces(traced))
        causes += _better_buckets(seen, simulated)
        causes = [replace(c, remedy=in_words_of(logs[0].wrapper, c.remedy)) for c in _network(causes, seen, simulated)]
        causes = list(_try(job, causes, seen, began + seconds, notes, tell))
        if not job.is_over:
            job.tell(_numbers(seen))
    return Explanation(
        command=" ".join(command),
        ranks=len(logs),
        hosts=len({log.host for log in logs}) if seen.links is None else len(seen.links.hosts),
        device=logs[0].device,
        shares=seen.shares,
        causes=tuple(ranked(causes, seen.shares.step_s)),
        all_s=_all_s(causes, seen, simulated),
        seconds=time.monotonic() - began,
        step=tuple(drawn(logs)),
        notes=tuple(notes),
    )


def _all_s(causes: Sequence[Cause], seen: Seen, simulated: Simulated | Additive | None) -> float | None:
    """Return the seconds per step with all remedies that do not change training; None if none of them gains.

    Remedies that the simulator knows are simulated together; the gains of all others are multiplied.
    """
    step_s = seen.shares.step_s
    helpful = [cause for cause in causes if cause.remedy and not cause.trains_differently and gain_s(cause, step_s) > 0]
    together = [cause for cause in helpful if cause.simulated_s is not None and cause.is_simulated]
    alone = [1 - gain_s(cause, step_s) / step_s for cause in helpful if cause not in together]
    if not helpful:
        return None
    return math.prod(alone) * (step_s if simulated is None or not together else simulated.step_s(together))


def _notes(log: RankLog, foreign_cores: float | None) -> Iterator[str]:
    if log.wrapper == "fleet":
        yield "fleet's strategy exchanges the gradients: nothing is simulated, and of remedies only threads are tried"
    if log.num_models > 1:
        yield f"{log.num_models} models train: parts are of all, buckets and remedies of the first alone"
    if is_busy(foreign_cores):
        yield f"other programs computed on {foreign_cores:.2g} cores meanwhile: look again when this host is quiet"


def _readiness(job: LookedAt, tell: Progress) -> Readiness | None:
    """Return a typical rank's readiness, with all ranks' unused parameters; None if the script ends, or without gradients."""
    parts = job.look(Look(what="ready", steps=_READY, warmup_steps=2, max_s=_READY_S), lambda *at: tell("gradients", *at))
    if job.is_over or any(part["ready"] is None for part in parts):
        return None
    found = [decode(part["ready"], Readiness, "ready") for part in parts]
    typical = sorted(found, key=lambda own: max(own.ready_ns))[(len(found) - 1) // 2]  # not a slow rank
    return replace(typical, unused=tuple(sorted({name for each in found for name in each.unused})))


def _traced(job: LookedAt) -> TraceShares | None:
    """Return the shares of steps that torch.profiler traces; None if the script ends.

    Python calls are recorded in separate steps, because they slow the host.
    """
    found: list[TraceShares] = []
    for name, stacks in (("plain", False), ("calls", True)):
        job.look(Look(what="times", steps=_TRACED, warmup_steps=1, trace=name, stacks=stacks))
        if job.is_over:
            return None
        found.append(read_shares(sorted(job.folder.glob(f"{name}-rank*.json")), "the steps' traces"))
    return replace(found[0], host_waits=found[1].host_waits)


def _numbers(seen: Seen) -> dict[str, float]:
    """Return milliseconds per step by activity, for the script's trackers; all waits are one number."""
    numbers = {"fleetbench/step_ms": 1e3 * seen.shares.step_s}
    for share in seen.shares.shares:
        name = f"fleetbench/{share.kind if share.rank is None else 'wait'}_ms"
        numbers[name] = numbers.get(name, 0.0) + 1e3 * share.seconds
    return numbers


def _simulate(cause: Cause, seen: Seen, simulated: Simulated | Additive | None) -> Cause:
    """Return the cause with ``simulated_s``, and without a remedy that neither gains nor can be tried."""
    if simulated is None or not (cause.spares or cause.interface is not None):
        return cause
    after_s = seen.shares.step_s - cause.regained * (seen.shares.step_s - simulated.step_s([cause]))
    gains = after_s < (1 - _GAIN) * seen.shares.step_s
    return replace(cause, simulated_s=after_s, remedy=cause.remedy if gains or cause.change is not None else "")


def _better_buckets(seen: Seen, simulated: Simulated | Additive | None) -> Iterator[Cause]:
    if simulated is None or isinstance(simulated, Additive) or len(seen.logs) == 1:
        return
    cap, after_s = simulated.best_cap(_CAPS)
    if after_s >= (1 - _GAIN) * seen.shares.step_s:
        return
    num, own = len(seen.model.bucket_nbytes), seen.model.bucket_cap_mb
    hidden = "nothing travels before the backward has ended" if num == 1 else f"{num} buckets hide less than others would"
    yield Cause(
        name=BUCKETS,
        what=f"{hidden}: bucket_cap_mb={'25 (the default)' if own is None else f'{own:g}'}",
        shares=seen.shares.part("gradients"),
        remedy=f"DistributedDataParallel(..., bucket_cap_mb={cap:g})",
        change=DdpChange(bucket_cap_mb=cap),
        spares=False,
        simulated_s=after_s,
    )


def _network(causes: Sequence[Cause], seen: Seen, simulated: Simulated | Additive | None) -> list[Cause]:
    """Add the step time without the network to its cause, unless it has a remedy, or other buckets hide much."""
    step_s, exposed_s = seen.shares.step_s, seen.shares.of("gradients", "gathers")
    hidden_s = max((step_s - cause.simulated_s for cause in causes if cause.name == BUCKETS and cause.simulated_s is not None), default=0.0)
    if simulated is None or hidden_s >= _HIDDEN * exposed_s:
        return list(causes)
    return [replace(c, simulated_s=step_s - exposed_s) if c.name == NETWORK and not c.remedy else c for c in causes]


def _try(job: LookedAt, causes: Sequence[Cause], seen: Seen, deadline_s: float, notes: list[str], tell: Progress) -> Iterator[Cause]:
    """Yield the causes with results of trying their remedies in the running script.

    A remedy that does not help is dropped. Its cause is dropped as well, unless the remedy was to remove
    shares of at least 2 % of a step.
    """
    can_try = [c for c in causes if c.change is not None and (seen.logs[0].can_change or c.change.threads is not None) and not job.is_over]
    tried = sorted(can_try, key=lambda cause: -gain_s(cause, seen.shares.step_s))[:_TRIES]
    for cause in causes:
        found = None
        if cause in tried and cause.change is not None and not job.is_over:
            number = tried.index(cause)
            tell("try remedies", number, len(tried))
            share_s = (deadline_s - time.monotonic()) / (len(tried) - number)
            try:
                found = try_change(job, cause.change, seen.shares.step_s, time.monotonic() + share_s)
            except FleetbenchError as error:
                notes.append(f"a trial of {cause.remedy} ended the script: {error.what}")
                job.is_over = True
        if found is None or found.helps:
            yield replace(cause, tried=found)
        elif cause.spares and cause.seconds >= LEAST_SHARE * seen.shares.step_s:
            yield replace(cause, tried=found, simulated_s=None, remedy="", change=None)
        else:
            notes.append(f"tried here without a gain that is sure: {cause.remedy}: {found}")
