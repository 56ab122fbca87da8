"""Results as tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fleetbench.cli.output import emit, emit_table
from fleetbench.cluster import Cluster
from fleetbench.experiment import Experiment
from fleetbench.quantities import counted
from fleetbench.report import units
from fleetbench.report.compare import Comparison
from fleetbench.result import Activations, Summary
from tuner.recommendation import Recommendation

if TYPE_CHECKING:
    from real.collective_bench_run import CollectiveReport
    from real.collectives.bench import Row

Reader = Callable[[Summary], Any]

_TIMES: tuple[tuple[str, Reader], ...] = (
    ("step, mean", lambda s: s.step_s["mean"]),
    ("step, median", lambda s: s.step_s["p50"]),
    ("step, p95", lambda s: s.step_s["p95"]),
    ("step, p99", lambda s: s.step_s["p99"]),
    ("  compute", lambda s: s.compute_s),
    ("  wait for the slowest", lambda s: s.wait_s),
    ("  exposed communication", lambda s: s.exposed_comm_s),
    ("  update", lambda s: s.update_s),
    ("  other", lambda s: s.other_s),
    ("whole run", lambda s: s.wall_s),
    ("time to target", lambda s: s.time_to_target_s),
)
_COUNTS: tuple[tuple[str, Reader, Callable[[Any], str]], ...] = (
    ("samples per second", lambda s: s.samples_per_s, lambda value: f"{value:,.0f}"),
    ("sent per trainer", lambda s: s.bytes_sent_per_trainer, units.size),
    ("synchronisations", lambda s: s.num_syncs, units.number),
    ("local steps, mean", lambda s: s.local_steps and s.local_steps["mean"], units.number),
    ("final loss", lambda s: s.final_loss, units.number),
)

_HARDLY = (
    "no more than one exchange of a trainer fell into the counted steps, the one behind its last: samples per second says little of "
    "what exchanges cost; take more steps, or a smaller k_steps"
)


def print_runs(runs: Mapping[str, Summary], experiment: Experiment) -> None:
    """Print summaries side by side: one, or the simulated and the real one with the simulator's error."""
    emit_table(runs_table(runs))
    emit_node_bandwidth(experiment.cluster)
    target = experiment.workload.target_loss
    for label, summary in runs.items():
        if summary.lateness_s:
            emit(f"emulated compute ({label}): {_lateness(summary.lateness_s)}")
        if summary.server_load:
            emit(f"parameter servers ({label}): {_servers(summary.server_load, summary.staleness)}")
            if _hardly_exchanges(summary, experiment):
                emit(f"note ({label}): {_HARDLY}")
        if target is not None and summary.time_to_target_s is None and summary.final_loss is not None:
            emit(f"target not reached ({label}): loss {summary.final_loss:.4g}, target {target:g}")
        for entry in summary.skipped:
            emit(f"SKIPPED ({label}) {entry['what']}: {entry['why']}")


def emit_node_bandwidth(cluster: Cluster) -> None:
    """Print what ``inter`` makes for a whole node and for each of its trainers, where that is not one number."""
    total, each = cluster.node_bandwidth, cluster.trainers_per_node
    if total is None or cluster.inter is None or cluster.nodes == 1 or each == cluster.nics_per_node == 1:
        return
    declared, whole, share = (f"{rate / 1e9:.4g} Gbit/s" for rate in (cluster.inter.bandwidth, total, total / each))
    nics = counted(cluster.nics_per_node, "network interface")
    emit(f"between nodes: {whole} a node, {share} for each of its {counted(each, 'trainer')} (declared: {nics} of {declared} a node)")


def _hardly_exchanges(summary: Summary, experiment: Experiment) -> bool:
    """Whether each trainer told each server once or never, of several steps; what synchronous training does not do."""
    counted = sum((summary.server_load or {}).get("staleness_histogram", {}).values())
    return experiment.strategy.a_sync and summary.steps > 1 and counted <= summary.trainers * summary.servers


def _lateness(found: Mapping[str, float]) -> str:
    """By how much the sleeps that stand for compute ended late."""
    spelled = {
        name: ", ".join(f"{key} {units.seconds(found[f'{name}_{key}'])}" for key in ("p50", "p95", "max")) for name in ("layer", "step")
    }
    return f"layers ended late by {spelled['layer']}; whole backwards by {spelled['step']}"


def _servers(load: Mapping[str, Any], staleness: Mapping[str, float] | None) -> str:
    """How busy they were, and how old what they were told; a real server does not know how long its queue was."""
    found = [f"busy {units.percent(load['utilisation'])} of the time"]
    if queue := load.get("queue_length"):
        found.append(f"queue {queue['mean']:.3g} messages (longest {queue['max']})")
    if waited := load.get("wait_s"):
        found.append(f"a message waited {units.seconds(waited['mean'])} (p95 {units.seconds(waited['p95'])})")
    if staleness:
        found.append(f"staleness {staleness['mean']:.3g} updates (p95 {staleness['p95']:g}, most {staleness['max']:g})")
    return ", ".join(found)


def runs_table(runs: Mapping[str, Summary]) -> Table:
    """A column a run; with ``simulated`` and ``real`` a third one, the error of the simulated figure."""
    any_run = next(iter(runs.values()))
    emulated = ", emulated compute" if any_run.emulated else ""
    size = f"{counted(any_run.trainers, 'trainer')}, {counted(any_run.steps, 'step')}"
    table = Table(title=f"{any_run.name}: {size}{emulated}", title_justify="left")
    table.add_column("")
    for label in runs:
        table.add_column(label, justify="right")
    both = {"simulated", "real"} <= set(runs)
    if both:
        table.add_column("error", justify="right")
    for name, read in _TIMES:
        values = {label: read(summary) for label, summary in runs.items()}
        cells = [units.seconds(value) for value in values.values()]
        table.add_row(name, *cells, *([_error(values["simulated"], values["real"])] if both else []))
    for name, read, spell in _COUNTS:
        cells = [units.NONE if (value := read(summary)) is None else spell(value) for summary in runs.values()]
        table.add_row(name, *cells)
    return table


def activations_line(activations: Activations) -> str:
    """What recompute saves."""
    saved, without = activations.saved_bytes, activations.without_recompute_bytes
    change = f", {units.percent(saved / without - 1.0, sign=True)}" if without else ""
    return f"activations saved for the backward: {units.size(saved)}; without recompute {units.size(without)}{change}"


def _error(simulated: float | None, real: float | None) -> str:
    return units.percent(simulated / real - 1.0, sign=True) if simulated and real else ""


def arms_table(recommendation: Recommendation) -> Table:
    """The strategies that ran for real: what the simulator said of them, and what was measured."""
    table = Table(title=f"{recommendation.name}: step times, simulated and real", title_justify="left")
    table.add_column("arm")
    for title in ("simulated ms", "real ms", "error"):
        table.add_column(title, justify="right")
    has_memory = any(arm.peak_bytes is not None for arm in recommendation.arms)
    if has_memory:
        table.add_column("memory", justify="right")
    table.add_column("target")
    table.add_column("strategy")
    for arm in recommendation.arms:
        real = sum(arm.measured_s) / len(arm.measured_s) if arm.measured_s else None
        target = "" if arm.target is None else "reached" if arm.target.reached else "not reached"
        table.add_row(
            arm.name,
            units.milliseconds(arm.simulated_s),
            units.milliseconds(real),
            _error(arm.simulated_s, real),
            *([units.NONE if arm.peak_bytes is None else units.size(arm.peak_bytes)] if has_memory else []),
            target,
            units.changes(arm.strategy.changes()),
        )
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Every quantity of two runs with their ratio."""
    table = Table(title=f"A = {comparison.a}\nB = {comparison.b}", title_justify="left")
    table.add_column("")
    for title in ("A", "B", "B / A"):
        table.add_column(title, justify="right")
    for row in comparison.known:
        table.add_row(*row.cells)
    return table


_COLLECTIVE_UNITS = dict.fromkeys(("time", "min", "max", "p99"), "us") | {
    "size": "B",
    "count": "elements",
    "algbw": "GB/s",
    "busbw": "GB/s",
    "cv": "%",
}


def collectives_table(name: str, report: CollectiveReport) -> Table:
    """One collective's rows, with the columns of nccl-tests."""
    from real.collectives.bench import COLUMNS

    run, benchmark = report.experiment.run, report.benchmark
    flights = "" if benchmark.communicators == 1 else f", {benchmark.communicators} in flight at once"
    title = f"{name}: {report.experiment.cluster.trainers} ranks, {run.backend}, launcher {run.launcher}{flights}"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        unit = f"({_COLLECTIVE_UNITS[column]})" if column in _COLLECTIVE_UNITS else " "
        table.add_column(f"{column}\n{unit}", justify="left" if column in ("type", "redop") else "right")
    for row in report.rows:
        if row.case.collective == name:
            table.add_row(*_collective_cells(row))
    return table


def _collective_cells(row: Row) -> list[str]:
    case, time_s = row.case, row.time_s
    bandwidths = (case.algbw(time_s, row.communicators), case.busbw(time_s, row.communicators))
    return [
        str(case.size_bytes),
        str(case.count),
        case.type,
        case.redop,
        _microseconds(time_s),
        *(f"{bandwidth * 1e-9:.4g}" for bandwidth in bandwidths),
        str(row.num_wrong),
        *(_microseconds(value_s) for value_s in (min(row.samples_s), max(row.samples_s), row.p99_s)),
        units.NONE if row.cv is None else f"{100 * row.cv:.1f}",
    ]


def _microseconds(value_s: float) -> str:
    """With the decimals of nccl-tests: none from 10 ms on, one from 100 us on, else two."""
    value_us = value_s * 1e6
    return f"{value_us:.{0 if value_us >= 10_000 else 1 if value_us >= 100 else 2}f}"
