"""The error of a simulation as tables that people read."""

from __future__ import annotations

from rich.table import Table

from fleetbench.cli.output import emit, emit_table
from fleetbench.report import units
from fleetbench.report.compare_fidelity import Fidelity
from fleetbench.report.step_errors import Noise, Phase, Spread, StepErrors

_NAMES = {
    "step": "step",
    "compute": "  compute",
    "wait": "  wait",
    "exposed_comm": "  exposed comm",
    "not_compute": "  these two",
    "update": "  update",
    "other": "  other",
}
_MOST_RANKS = 16


def print_fidelity(fidelity: Fidelity) -> None:
    """Print what differs, the errors beside the noise, and what a reader must know."""
    found = fidelity.match
    emit("")
    if fidelity.errors is None:
        emit("NOT COMPARED step by step: simulated and real are of other experiments, ranks or steps (sim against real)")
    elif found.differences:
        emit("compared step by step, although these differ (sim against real)")
    for difference in found.differences:
        emit(f"  {'!' if difference.other_steps else '-'} {difference.text()}")
    if fidelity.errors is not None:
        _print_errors(fidelity, fidelity.errors)
    for note in fidelity.notes:
        emit(f"note: {note}")


def _print_errors(fidelity: Fidelity, errors: StepErrors) -> None:
    emit_table(phases_table(fidelity, errors))
    emit_table(ranks_table(errors, fidelity.noise))
    rank, step, predicted_s, true_s = errors.worst
    emit(f"worst: step {step} of rank {rank}, {units.milliseconds(predicted_s)} ms simulated, {units.milliseconds(true_s)} ms real")
    ratio = errors.wall_log_ratio
    text = f"run time: {units.seconds(errors.predicted_wall_s)} simulated, {units.seconds(errors.true_wall_s)} real, log-ratio {ratio:+.4f}"
    if fidelity.noise is None:
        emit(text)
        emit("noise: not measured; name further real runs of this experiment behind A and B")
        return
    emit(f"{text}; real runs among themselves {fidelity.noise.wall_log_ratio:.4f}")
    if fidelity.within_noise["wall"]:
        emit("the error of the run time is below the noise: it is no larger than what real runs differ by")


def phases_table(fidelity: Fidelity, errors: StepErrors) -> Table:
    """The step and its parts: means of both, and errors over all ranks and steps in ms and in shares of the real step."""
    table = Table(title="error of the simulation (sim - real), ms", title_justify="left", caption_justify="left")
    for title in ("", "sim", "real", "bias", "of itself", "of step", "mean abs", "of step", "p95", "max", "noise", "below"):
        table.add_column(title, justify="left" if title == "" else "right")
    noise, within = fidelity.noise, fidelity.within_noise
    for phase in (errors.step, *errors.phases):
        cells = _phase_cells(phase, errors.step.true_s)
        aside = units.NONE if noise is None else units.milliseconds(noise.phase_s(phase.name).mean_absolute)
        table.add_row(_NAMES[phase.name], *cells, aside, "yes" if within.get(phase.name) else "")
    if noise is not None:
        table.caption = "noise: mean abs between two real runs, of the pair furthest apart; below: the error is no larger than that"
    return table


def ranks_table(errors: StepErrors, noise: Noise | None) -> Table:
    """Relative step errors: of all, of each rank (the worst of many), and of real runs among themselves."""
    table = Table(title="error of a step, share of that step", title_justify="left")
    table.add_column("rank")
    for title in ("bias", "mean abs", "p95", "max"):
        table.add_column(title, justify="right")
    table.add_row("all", *_relative_cells(errors.relative))
    ranks = sorted(errors.by_rank.items(), key=lambda item: -item[1].mean_absolute)[:_MOST_RANKS]
    for rank, spread in sorted(ranks):
        table.add_row(str(rank), *_relative_cells(spread))
    if len(errors.by_rank) > _MOST_RANKS:
        table.caption = f"the {_MOST_RANKS} worst of {len(errors.by_rank)} ranks; --json holds all"
    if noise is not None:
        table.add_section()
        table.add_row(f"noise: {noise.num_runs} real runs", *_relative_cells(noise.relative))
    return table


def _phase_cells(phase: Phase, step_s: float) -> list[str]:
    error = phase.error_s
    return [
        units.milliseconds(phase.predicted_s),
        units.milliseconds(phase.true_s),
        _signed(error.bias),
        units.percent(phase.relative_bias, sign=True),
        units.percent(error.bias / step_s, sign=True),
        units.milliseconds(error.mean_absolute),
        units.percent(error.mean_absolute / step_s),
        units.milliseconds(error.p95),
        units.milliseconds(error.max),
    ]


def _relative_cells(spread: Spread) -> list[str]:
    return [units.percent(spread.bias, sign=True), *(units.percent(value) for value in (spread.mean_absolute, spread.p95, spread.max))]


def _signed(value_s: float) -> str:
    text = units.milliseconds(value_s)
    return f"+{text}" if value_s > 0 else text
