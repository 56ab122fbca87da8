"""Results: what the ranks of a script's leg wrote, as a run of this project.

All times are put on rank 0's clock. Steps after which the script evaluated its model, and those that
follow, up to the next exchange, are left out, on all ranks, and the gap is closed: an evaluation is no
part of a step, and where one rank evaluates alone the others wait for it in that exchange. Where most
steps are followed by one, it belongs to the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fleetbench.declared import first_hit
from fleetbench.experiment import Experiment
from fleetbench.result import Outcome, RunResult, skip, steps_table
from fleetbench.store import new_run_id
from fleetbench.workload import LINEAR_OPTIMIZERS
from real.collect import RankPart, collect, result_of
from real.leg import Leg

Part = Mapping[str, Any]
LEAST_STEPS = 3
"""Counted steps that a leg must have to be one."""


def run_of(experiment: Experiment, leg: Leg, parts: Sequence[Part], foreign_cores: float | None = None) -> RunResult:
    """The run that a leg was; ``parts`` in rank order. ``experiment`` is given the leg's strategy and steps."""
    ranks = _undisturbed([_on_first_clock(part) for part in parts], {step for part in parts for step in part["evaluated"]})
    collected = collect(ranks, None)
    table = steps_table(collected.records)
    last_step = min(int(part["steps"][-1]["record"]["step"]) for part in parts)
    final_loss, time_to_target_s = _losses(table, experiment, last_step) if leg.evaluate else (None, None)
    experiment = experiment_of_leg(experiment, leg, int(table.loc[table["step"] >= 1, "step"].nunique()))
    skipped = []
    if experiment.workload.target_loss is not None and not leg.evaluate:
        skipped.append(skip("workload.target_loss", "not evaluated in this leg"))
    outcome = Outcome(
        executor="real",
        run_id=new_run_id(),
        final_loss=final_loss,
        time_to_target_s=time_to_target_s,
        skipped=skipped,
        foreign_cores=foreign_cores,
    )
    run = result_of(experiment, parts, collected, table, outcome)
    return dataclasses.replace(run, peak_bytes=tuple(part["peak_bytes"] for part in parts))


def num_counted(parts: Iterable[Part]) -> int:
    """Counted steps that every rank has finished."""
    return min((sum(step["record"]["step"] >= 1 for step in part["steps"]) for part in parts), default=0)


def experiment_of_leg(experiment: Experiment, leg: Leg, steps: int) -> Experiment:
    """The experiment that a leg carried out.

    Legs of a profile take local steps with any optimizer: they measure time, and no experiment would ask for that.
    """
    workload = dataclasses.replace(experiment.workload, steps=max(1, steps))
    if leg.strategy.needs_linear_optimizer and workload.optimizer not in LINEAR_OPTIMIZERS:
        workload = dataclasses.replace(workload, optimizer="momentum")
    return experiment.replace(strategy=leg.strategy, workload=workload)


def _on_first_clock(part: Part) -> RankPart:
    """A rank's part with its times on rank 0's clock."""
    decoded = RankPart.from_dict({"steps": part["steps"], "spans": part["spans"], "held_out": []})
    offsets = part.get("clock_offsets_ns", [[0, 0]])
    (begin, first), (end, last) = offsets[0], offsets[-1]
    return _shifted(decoded, lambda _step, at: first + (last - first) * (at - begin) // max(1, end - begin))


def _shifted(part: RankPart, by_ns: Callable[[int, int], int]) -> RankPart:
    """The part with every step earlier by what its number and the nanosecond of its begin say."""
    steps = []
    for timed in part.steps:
        record = timed.record
        by = by_ns(record.step, record.start_ns)
        arrival = None if record.arrival_ns is None else record.arrival_ns - by
        record = dataclasses.replace(record, start_ns=record.start_ns - by, end_ns=record.end_ns - by, arrival_ns=arrival)
        steps.append(dataclasses.replace(timed, record=record))
    spans = []
    for span in part.spans:
        by = by_ns(span.step, span.start_ns)
        spans.append(dataclasses.replace(span, start_ns=span.start_ns - by, end_ns=span.end_ns - by))
    return RankPart(tuple(steps), tuple(spans), part.held_out)


def _undisturbed(ranks: Sequence[RankPart], evaluated: set[int]) -> list[RankPart]:
    """The steps that all ranks have, without those around an evaluation."""
    common = set.intersection(*({timed.record.step for timed in part.steps} for part in ranks))
    dropped = {step for found in evaluated for step in range(found, _next_exchange(ranks[0], common, found) + 1)} & common
    kept = common - dropped
    if len(evaluated) > len(common) / 2 or sum(step >= 1 for step in kept) < LEAST_STEPS:
        kept, dropped = common, set()
    starts = sorted((timed.record.step, timed.record.start_ns) for timed in ranks[0].steps if timed.record.step in common)
    earlier_ns: dict[int, int] = {}  # by which each step moves, so that no gap is left of those that were dropped before it
    gone_ns = 0
    for (step, start_ns), (_, next_ns) in zip(starts, [*starts[1:], starts[-1]], strict=True):
        earlier_ns[step] = gone_ns
        gone_ns += next_ns - start_ns if step in dropped else 0
    return [_shifted(_only(part, kept), lambda step, _at: earlier_ns[step]) for part in ranks]


def _next_exchange(part: RankPart, common: set[int], evaluated: int) -> int:
    """The first step after ``evaluated`` in which ranks wait for each other; the last one of all where there is none."""
    meets = {timed.record.step for timed in part.steps if timed.record.arrival_ns is not None} or common
    return min((step for step in meets if step > evaluated), default=max(common, default=evaluated))


def _only(part: RankPart, steps: set[int]) -> RankPart:
    return RankPart(
        tuple(timed for timed in part.steps if timed.record.step in steps),
        tuple(span for span in part.spans if span.step in steps),
        part.held_out,
    )


def _losses(table: pd.DataFrame, experiment: Experiment, last_step: int) -> tuple[float | None, float | None]:
    """Final loss, and seconds to the target: of the loss that the script reports, its mean over all ranks and ``eval_every`` steps.

    A window counts once it is over, by ``last_step``; steps that were cut out of it, and those without a report, are no part of its mean.
    """
    workload = experiment.workload
    counted = table[(table["step"] >= 1) & table["loss"].notna()]
    windows = counted["loss"].groupby((counted["step"] - 1) // workload.eval_every).mean()
    windows = windows[(windows.index + 1) * workload.eval_every <= last_step]
    if windows.empty:
        return None, None
    hit = None if workload.target_loss is None else first_hit([loss <= workload.target_loss for loss in windows])
    if hit is None:
        return float(windows.iloc[-1]), None
    reached = (int(windows.index[hit]) + 1) * workload.eval_every
    kept = table.loc[table["step"].between(1, reached), "step"]
    parts = ["forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s"]
    until = table[table["step"] == kept.max()]
    begin_s = float(table.loc[table["step"] >= 1, "start_s"].min())
    took_s = float((until["start_s"] + until[parts].sum(axis=1)).max()) - begin_s
    return float(windows.iloc[-1]), took_s * reached / kept.nunique()  # a step that was cut out took what the others did
