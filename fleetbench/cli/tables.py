"""Results as tables for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli.output import emit, emit_table, new_table
from fleetbench.cluster import Cluster
from fleetbench.config import flat
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted, hours_or_days
from fleetbench.result import Summary
from fleetbench.utilisation import Utilisation

if TYPE_CHECKING:
    from rich.table import Table

    from sim.churn.goodput import Goodput

TIMES = (
    ("step_s.mean", "step, mean"),
    ("step_s.p50", "step, median"),
    ("step_s.p95", "step, p95"),
    ("step_s.p99", "step, p99"),
    ("compute_s", "  compute"),
    ("wait_s", "  wait for the slowest"),
    ("exposed_comm_s", "  exposed communication"),
    ("update_s", "  update"),
    ("other_s", "  other"),
    ("wall_s", "whole run"),
    ("time_to_target_s", "time to target"),
)
"""Keys of a summary's figures in seconds, with their labels in tables."""
_COUNTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("samples_per_s", "samples per second", "{:,.0f}".format),
    ("bytes_sent_per_trainer", "sent per trainer", units.size),
    ("num_syncs", "synchronisations", units.number),
    ("local_steps.mean", "local steps, mean", units.number),
    ("final_loss", "final loss", units.number),
)


def print_runs(runs: Mapping[str, Summary], experiment: Experiment) -> None:
    """Print the summary of one run, or those of a simulated and a real run, with the simulator's error."""
    has_losses = any(summary.loss_from is not None for summary in runs.values())
    said = (target_of(experiment) if has_losses else "") + experiment.cluster.said_of_stragglers
    emit_table(runs_table(runs, said))
    emit(f"strategy: {units.changes(experiment.strategy.changes())}")
    target = experiment.workload.target_loss
    for label, summary in runs.items():
        if summary.per_trainer is not None:
            emit(f"{Utilisation(**summary.per_trainer).line}{f' ({label})' if len(runs) > 1 else ''}")
        if summary.loss_from is not None:
            emit(f"losses ({label}): from {summary.loss_from}")
        if summary.lateness_s:
            emit(f"emulated compute ({label}): {_lateness(summary.lateness_s)}")
        if summary.server_load:
            emit(f"parameter servers ({label}): {_servers(summary.server_load, summary.staleness)}")
        if target is not None and summary.time_to_target_s is None and summary.final_loss is not None:
            needs = ", of which three evaluations in a row are needed" if summary.final_loss <= target else ""
            emit(f"target not reached ({label}): loss {summary.final_loss:.4g}, target {target:g}{needs}")
        for entry in summary.skipped:
            emit(f"SKIPPED ({label}) {entry['what']}: {entry['why']}")


def _lateness(found: Mapping[str, float]) -> str:
    """Describe how late emulated compute, which is sleep, ended."""
    spelled = {
        name: ", ".join(f"{key} {units.seconds(found[f'{name}_{key}'])}" for key in ("p50", "p95", "max")) for name in ("layer", "step")
    }
    return f"layers ended late by {spelled['layer']}; whole backwards by {spelled['step']}"


def _servers(load: Mapping[str, Any], staleness: Mapping[str, float] | None) -> str:
    """Describe how busy parameter servers were, and the staleness of gradients."""
    found = [f"busy {units.percent(load['utilisation'])} of the time"]
    if staleness:
        found.append(f"staleness {staleness['mean']:.3g} updates (p95 {staleness['p95']:g}, most {staleness['max']:g})")
    return ", ".join(found)


def target_of(experiment: Experiment) -> str:
    """Return the part of a heading that names the target loss; empty without a target."""
    return "" if experiment.workload.target_loss is None else f", target loss {experiment.workload.target_loss:g}"


def runs_table(runs: Mapping[str, Summary], target: str = "") -> Table:
    """Return a table with one column per run; ``target`` is the end of its heading.

    If the runs are ``simulated`` and ``real``, a third column has the error of the simulated figure.
    """
    any_run = next(iter(runs.values()))
    emulated = ", emulated compute" if any_run.emulated else ""
    size = f"{counted(any_run.trainers, 'trainer')}, {counted(any_run.steps, 'step')}"
    both = {"simulated", "real"} <= set(runs)
    table = new_table(f"{any_run.name}: {size}{emulated}{target}", "", *runs, *(["error"] if both else []))
    figures = {label: dict(flat(dataclasses.asdict(summary))) for label, summary in runs.items()}
    for key, name in TIMES:
        cells = [units.seconds(values.get(key)) for values in figures.values()]
        if both:
            simulated, real = (figures[label].get(key) for label in ("simulated", "real"))
            cells.append(units.percent(simulated / real - 1.0, sign=True) if simulated and real else "")
        table.add_row(name, *cells)
    for key, name, spell in _COUNTS:
        table.add_row(name, *(spell(values.get(key)) for values in figures.values()))
    return table


def goodput_table(title: str, *first: str, has_price: bool) -> Table:
    """Return a table for the cells of ``goodput_cells`` after those of the ``first`` columns."""
    price = ["price of 1e6"] if has_price else []
    names = (*first, "checkpoint every", "useful samples/s", *price, "of undisturbed", "paid time that brings no sample")
    table = new_table(title, *names, left=(names[-1],))
    table.caption = "of undisturbed: useful samples per paid second of a trainer, as a share of those with all nodes and no checkpoint"
    return table


def goodput_cells(one: Goodput, rate: float, price: float | None, *, has_price: bool) -> list[str]:
    """Return the cells of a policy's row; ``rate`` and ``price`` may count the samples to a target."""
    half = (one.interval[1] - one.interval[0]) / 2 / one.samples_per_s if one.samples_per_s else 0.0
    spread = f" +-{units.percent(half)}" if len(one.by_seed) > 1 else ""
    costs = [units.NONE if price is None else f"{price:,.2f}"] if has_price else []
    return [one.every, f"{rate:,.4g}{spread}", *costs, units.percent(one.share), one.idle]


def print_goodput(found: list[Goodput], cluster: Cluster) -> None:
    """Print the goodput of a strategy under each policy."""
    first = found[0]
    drawn = "of a trace" if len(first.by_seed) == 1 else f"with each of {len(first.by_seed)} seeds"
    took = f"{hours_or_days(first.wall_s / 3600)} {drawn}"
    title = f"under cluster.churn: up to {counted(cluster.nodes, 'node')}, {took}, K = {first.local_steps}"
    has_price = any(one.price is not None for one in found)
    table = goodput_table(title, "policy", has_price=has_price)
    for one in found:
        table.add_row(one.policy, *goodput_cells(one, one.samples_per_s, one.price, has_price=has_price))
    emit_table(table)
