"""An evaluation, and its comparison with an online service, as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fleetbench.cli.output import emit, emit_table
from fleetbench.report import units
from fleetbench.report.vector_comparison import SampleDifference, VectorComparison


def print_evaluation(summary: Mapping[str, Any]) -> None:
    """Print what was evaluated, and what is odd about it."""
    layer = "" if summary["layer"] is None else f", layer {summary['layer']}"
    data = "its factory's inputs" if summary["data"] is None else summary["data"]
    emit(f"{summary['name']}: {summary['model']}{layer} on {data}, device {summary['device']}")
    emit(f"  weights: {'the factory' if summary['checkpoint'] is None else summary['checkpoint']}")
    rate = f"{summary['samples_per_s']:,.0f} samples per second"
    emit(f"  {summary['samples']:,} vectors of {summary['length']:,} numbers, batches of {summary['batch_size']}, {rate}")
    if summary["num_not_finite"]:
        emit(f"  WARNING: {summary['num_not_finite']:,} vectors hold NaN or infinity")
    for entry in summary["skipped"]:
        emit(f"SKIPPED {entry['what']}: {entry['why']}")


def print_comparison(comparison: VectorComparison) -> None:
    """Print the figures over all samples, the worst samples, and whether they pass."""
    emit(f"offline: {comparison.offline}\nonline:  {comparison.online}")
    emit_table(figures_table(comparison))
    differing = tuple(item for item in comparison.worst if item.difference)
    if differing:
        emit_table(worst_table(differing))
    notes = [f"{comparison.num_equal:,} equal"]
    if comparison.num_not_finite:
        notes.append(f"{comparison.num_not_finite:,} with NaN or infinity")
    verdict = "all within" if comparison.passed else f"{comparison.num_past:,} past"
    emit(f"{comparison.samples:,} samples ({', '.join(notes)}): {verdict} the tolerance of {comparison.tolerance:g}")


def figures_table(comparison: VectorComparison) -> Table:
    """Over all samples whose vectors are finite."""
    table = Table(title=f"{comparison.samples:,} vectors of {comparison.length:,} numbers, online against offline", title_justify="left")
    table.add_column("")
    for title in ("worst", "p95", "mean"):
        table.add_column(title, justify="right")
    table.add_row("cosine", _cosine(comparison.lowest_cosine), "", _cosine(comparison.mean_cosine))
    for name, spread in (("largest difference", comparison.difference), ("  share of the largest magnitude", comparison.relative)):
        table.add_row(name, *(_short(value) for value in (spread.max, spread.p95, spread.mean)))
    return table


def worst_table(worst: tuple[SampleDifference, ...]) -> Table:
    """The samples furthest apart, the worst first."""
    table = Table(title="the worst samples", title_justify="left")
    table.add_column("sample", overflow="fold")
    for title in ("cosine", "difference", "share", "at number", "offline", "online"):
        table.add_column(title, justify="right")
    for item in worst:
        numbers = (f"{item.offline:.7g}", f"{item.online:.7g}")
        table.add_row(item.id, _cosine(item.cosine), _short(item.difference), _short(item.relative), str(item.component), *numbers)
    return table


def _cosine(value: float | None) -> str:
    return units.NONE if value is None else f"{value:.9f}"


def _short(value: float | None) -> str:
    return units.NONE if value is None else f"{value:.2e}"
