"""Results: turn the files of a leg's ranks and servers into a run, with all times on rank 0's clock.

Pauses (to copy parameters for an evaluation) are cut out of the clock. Each pause is cut by the same time on
all ranks, that of the rank with the shortest pause: times of a step then stay comparable between ranks, and
no step begins before the rank's previous one has ended. The rest of a longer pause counts as the loop's work
(``other``).

In a user's script, a step after which the script evaluated its model, and the following ones up to the next
exchange, are left out on all ranks, and the gap is closed by the time common to all ranks: an evaluation is
no part of a step, and if only one rank evaluates, the others wait for it in that exchange. If most steps are
followed by an evaluation, it counts as part of the loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.replay import Recording, in_order
from fleetbench.result import RunResult, StepRecord, skip, steps_table, summarise
from fleetbench.store import new_run_id
from fleetbench.target import Crossing, crossing
from fleetbench.timeline import COMMUNICATION, COMPUTE, HOST, Span
from fleetbench.workload import LINEAR_OPTIMIZERS
from real.engine.stopwatch import TimedSpan
from real.leg import Leg

Part = Mapping[str, Any]
LEAST_STEPS = 3
"""Smallest number of counted steps in a leg."""


def collect(parts: Sequence[Part]) -> tuple[list[StepRecord], tuple[Span, ...], float]:
    """Return steps and spans of all ranks, and the seconds that they took including pauses.

    ``parts`` are in rank order, on one clock. Time begins with the first step of any rank.
    """
    origin = min(part["steps"][0]["record"]["start_ns"] for part in parts)
    last = max(step["record"]["end_ns"] for part in parts for step in part["steps"])
    paused: dict[int, int] = {}  # by step, on the rank that pauses least
    for step in (step for part in parts for step in part["steps"]):
        number, own_ns = step["record"]["step"], step["paused_ns"]
        paused[number] = min(paused.get(number, own_ns), own_ns)
    parts = [
        _without(part, [(step["record"]["end_ns"] - step["paused_ns"], paused[step["record"]["step"]]) for step in part["steps"]], origin)
        for part in parts  # a pause is the last that a rank does in a step
    ]
    steps = [step for part in parts for step in part["steps"]]
    started = sorted((step["started_ns"], step["record"]["step"]) for step in steps if step.get("started_ns") is not None)
    latest = {number: started_ns for started_ns, number in started}
    records = [_record(step, latest) for step in steps]
    several = any(span.get("communicator") for part in parts for span in part["spans"])
    spans = [_span(rank, TimedSpan(**span), several=several) for rank, part in enumerate(parts) for span in part["spans"]]
    return records, tuple(spans), (last - origin) * 1e-9


def _record(step: Part, latest: Mapping[int, int]) -> StepRecord:
    """Return a step's record.

    ``latest``: time in ns, by step, at which the last rank started the exchange that the step waits for, if an
    earlier step started it.
    """
    told = dict(step["record"])
    if step.get("started_ns") is not None:
        told["wait_ns"] = min(max(latest[told["step"]] - told["arrival_ns"], 0), told["stall_ns"])
    return StepRecord(**told)


def _span(rank: int, span: TimedSpan, *, several: bool) -> Span:
    stream = HOST if span.is_host else COMPUTE
    if span.communicator is not None:
        stream = f"{COMMUNICATION} {span.communicator}" if several else COMMUNICATION
    return Span(rank, stream, span.name, span.start_ns, span.end_ns - span.start_ns)


def _to_target(told: Sequence[tuple[int, float]], target: float | None, records: Sequence[StepRecord]) -> tuple[float, Crossing] | None:
    """Return the seconds from the first counted step to the end of the step that reaches the target, and the crossing.

    Returns ``None`` if the target is not reached. ``told``: step and loss of each evaluation.
    """
    if (reached := crossing(told, target)) is None:
        return None
    kept = [record for record in records if 1 <= record.step <= reached.step]
    took_s = (max(record.end_ns for record in kept) - min(record.start_ns for record in kept)) * 1e-9
    return took_s * (reached.step / len({record.step for record in kept})), reached  # steps that were cut out count with the others' mean


def run_of(
    experiment: Experiment,
    leg: Leg,
    parts: Sequence[Part],
    reports: Sequence[Part] = (),
    *,
    skipped: Sequence[dict[str, str]] = (),
    **known: Any,
) -> RunResult:
    """Return the result of a leg from its ranks' ``parts``, in rank order, and its servers' ``reports``.

    The result's experiment is ``experiment`` with the leg's strategy and steps. ``known``: other fields of ``Summary``.
    """
    ranks = _undisturbed([_on_first_clock(part) for part in parts], {step for part in parts for step in part["evaluated"]})
    records, spans, host_s = collect(ranks)
    table = steps_table(records)
    if "held_out" in parts[0]:
        told, final_loss = parts[0]["held_out"], parts[0]["final_loss"]
    else:
        told = reported_losses(table, experiment.workload.eval_every, leg.steps) if leg.evaluate else []
        final_loss = told[-1][1] if told else None
    to_target = _to_target(told, experiment.workload.target_loss, records)
    experiment = experiment_of_leg(experiment, leg, int(table.loc[table["step"] >= 1, "step"].nunique()))
    if experiment.workload.target_loss is not None and not leg.evaluate:
        skipped = [*skipped, skip("workload.target_loss", "not evaluated in this leg")]
    if experiment.strategy.localsgd_configs.outer_on_host and experiment.run.device != "cuda":
        skipped = [*skipped, skip("strategy.localsgd_configs.outer_on_host", "the trainers' memory is the host's")]
    known |= {"final_loss": final_loss, "skipped": skipped}
    if to_target is not None:
        time_to_target_s, reached = to_target
        metrics = _metrics(parts, reached.step - experiment.workload.eval_every, reached.step)
        known |= {"time_to_target_s": time_to_target_s, "steps_to_target": reached.smooth, "metrics": metrics}
    if leg.ends_at_target and "held_out" in parts[0] and experiment.run.device != "emulated":
        known |= {
            "time_to_target_s": None,
            "skipped": [*skipped, skip("time_to_target_s", "trainers met for evaluations beside their steps")],
        }
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, table, executor="real", run_id=new_run_id(), **known),
        steps=table,
        plan=Plan.from_dict(parts[0]["plan"]),
        spans=spans,
        recordings=in_order(
            [
                *(Recording.from_dict(told) for part in parts for told in part["recordings"]),
                *(Recording.from_dict(told) for report in reports for told in report["roles"]),
            ]
        ),
        host_s=host_s,
        peak_bytes=tuple(part["peak_bytes"] for part in parts),
        held_out=tuple((step, loss) for step, loss in parts[0].get("held_out", ())),
    )


def _metrics(parts: Sequence[Part], after: int, to: int) -> dict[str, float] | None:
    """Return each metric's mean over all ranks and the steps from ``after + 1`` to ``to``; ``None`` without metrics."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, told in part.get("metrics", {}).items():
            values.setdefault(name, []).extend(value for step, value in told if after < step <= to)
    return {name: statistics.fmean(found) for name, found in values.items() if found} or None


def experiment_of_leg(experiment: Experiment, leg: Leg, steps: int) -> Experiment:
    """Return the experiment of a leg.

    Legs of a profile take local steps with any optimizer, because they only measure time. An experiment with local
    steps must have a linear optimizer, so ``momentum`` replaces any other.
    """
    workload = dataclasses.replace(experiment.workload, steps=max(1, steps))
    if leg.strategy.needs_linear_optimizer and workload.optimizer not in LINEAR_OPTIMIZERS:
        workload = dataclasses.replace(workload, optimizer="momentum")
    return experiment.replace(strategy=leg.strategy, workload=workload)


def _on_first_clock(part: Part) -> Part:
    offsets = part.get("clock_offsets_ns", [[0, 0]])
    (begin, first), (end, last) = offsets[0], offsets[-1]
    return _shifted(part, lambda moment: first + (last - first) * (moment - begin) // max(1, end - begin))


def _without(part: Part, gaps: Sequence[tuple[int, int]], origin: int = 0) -> Part:
    """Return the part with times relative to ``origin`` and without ``gaps`` (begin and length, in order)."""
    begins = [begin for begin, _ in gaps]
    before = [0, *itertools.accumulate(length for _, length in gaps)]

    def earlier(moment: int) -> int:
        place = bisect.bisect_right(begins, moment) - 1
        return origin if place < 0 else origin + before[place] + min(moment - begins[place], gaps[place][1])

    return _shifted(part, earlier)


def _shifted(part: Part, by_ns: Callable[[int], int]) -> Part:
    """Return the part with every time ``t`` of its steps and spans, in ns, reduced by ``by_ns(t)``."""

    def earlier(entry: Part) -> dict[str, Any]:
        moments = [name for name in ("start_ns", "end_ns", "arrival_ns", "started_ns") if entry.get(name) is not None]
        return {**entry, **{name: entry[name] - by_ns(entry[name]) for name in moments}}

    steps = [{**earlier(step), "record": earlier(step["record"])} for step in part["steps"]]
    return {**part, "steps": steps, "spans": [*map(earlier, part["spans"])]}


def _undisturbed(ranks: Sequence[Part], evaluated: set[int]) -> Sequence[Part]:
    steps = {step["record"]["step"] for step in ranks[0]["steps"]}
    dropped = {step for found in evaluated for step in range(found, _next_exchange(ranks[0], steps, found) + 1)} & steps
    kept = steps - dropped
    if not dropped or len(evaluated) > len(steps) / 2 or sum(step >= 1 for step in kept) < LEAST_STEPS:
        return ranks
    begins = [step for step in sorted(dropped) if step - 1 in kept or step == min(steps)]
    resumed = {begin: min((step for step in kept if step > begin), default=begin) for begin in begins}
    starts = [{step["record"]["step"]: step["record"]["start_ns"] for step in part["steps"]} for part in ranks]
    gaps = {begin: min(own[after] - own[begin] for own in starts) for begin, after in resumed.items()}
    found = []
    for part, own in zip(ranks, starts, strict=True):
        timed = [step for step in part["steps"] if step["record"]["step"] in kept]
        spans = [span for span in part["spans"] if span["step"] in kept]
        found.append(_without({**part, "steps": timed, "spans": spans}, [(own[begin], gap_ns) for begin, gap_ns in gaps.items()]))
    return found


def _next_exchange(part: Part, steps: set[int], evaluated: int) -> int:
    """Return the first step after ``evaluated`` in which ranks wait for each other, or else the last step."""
    meets = {step["record"]["step"] for step in part["steps"] if step["record"]["arrival_ns"] is not None} or steps
    return min((step for step in meets if step > evaluated), default=max(steps))


def reported_losses(table: pd.DataFrame, every: int, last_step: int) -> list[tuple[int, float]]:
    """Return the last step and the mean reported loss, over all ranks, of each window of ``every`` steps.

    Windows that end after ``last_step`` are left out. Steps that were cut out, and steps without a report, do not
    count in the mean.
    """
    counted = table[(table["step"] >= 1) & table["loss"].notna()]
    windows = counted["loss"].groupby((counted["step"] - 1) // every).mean()
    ends = [(window + 1) * every for window in windows.index.tolist()]
    return [(end, loss) for end, loss in zip(ends, windows.tolist(), strict=True) if end <= last_step]
