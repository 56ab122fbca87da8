"""A profile as tables that people read."""

from __future__ import annotations

from rich.table import Table

from fleetbench.cli.output import emit, emit_table
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Communication, Profile
from fleetbench.report import units
from fleetbench.report.profile_page import own_table

_MOST_LAYERS = 12
"""Layers in the printed table; the file and the page hold them all."""


def print_profile(experiment: Experiment, profile: Profile) -> None:
    """Print every part that was measured; of the tables, the experiment's own."""
    table = own_table(experiment, profile)
    if table is not None:
        emit_table(layers_table(table))
        emit_table(costs_table(table, profile))
    if profile.threads:
        emit_table(threads_table(profile))
    if profile.communication is not None:
        emit_table(communication_table(profile.communication))
    if profile.busy:
        emit(f"warning: {profile.busy}; profile again when it is quiet")
    for note in profile.notes:
        emit(f"note: {note}")
    if profile.stragglers is not None:
        for statement in profile.stragglers.statements:
            emit(f"stragglers: {statement}")


def layers_table(table: LayerTable) -> Table:
    """The layers that take longest, in backward order of readiness."""
    ordered = [layer for layer in reversed(table.layers) if layer.gradients]
    longest = sorted(ordered, key=lambda layer: -(layer.forward + layer.backward))[:_MOST_LAYERS]
    left = len(ordered) - len(longest)
    title = f"layers in backward order of readiness{f', the {len(longest)} longest of {len(ordered)}' if left else ''}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("layer")
    for name in ("parameters", "forward", "± MAD", "backward", "± MAD", "ready", "activations"):
        shown.add_column(name, justify="right")
    for layer in (layer for layer in ordered if layer in longest):
        shown.add_row(
            layer.name or "(the model itself)",
            f"{sum(gradient.numel for gradient in layer.gradients):,}",
            *(units.seconds(time * 1e-9) for time in (layer.forward, layer.forward_mad, layer.backward, layer.backward_mad)),
            units.seconds(max(gradient.ready for gradient in layer.gradients) * 1e-9),
            units.size(layer.activation_bytes),
        )
    return shown


def costs_table(table: LayerTable, profile: Profile) -> Table:
    """What a step costs in all, and memory."""
    shown = Table(title="a step", title_justify="left", show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    for name, time in (
        ("forward", table.forward_ns),
        ("backward", table.backward_ns),
        ("optimizer", table.update),
        ("optimizer under Local SGD", table.local_update),
        ("reading, and the loop's own work", table.read),
        ("averaging under Local SGD, without its communication", table.merge),
        ("copying all gradients into buckets", table.pack),
        ("host time a collective", table.host_per_collective),
    ):
        if time is not None:
            shown.add_row(name, units.seconds(time * 1e-9))
    if profile.memory is not None:
        shown.add_section()
        for name in ("parameters", "gradients", "optimizer_state", "activations", "peak"):
            shown.add_row(f"memory: {name.replace('_', ' ')}", units.size(getattr(profile.memory, name)))
    return shown


def threads_table(profile: Profile) -> Table:
    """How a step scales with threads."""
    shown = Table(title="threads of a trainer", title_justify="left")
    for name in ("threads", "step", "speed-up", "compute", "speed-up", "compute slows beside traffic", "traffic slows beside compute"):
        shown.add_column(name, justify="right")
    first = profile.threads[0]
    for line in profile.threads:
        shown.add_row(
            str(line.thread_num),
            units.seconds(line.step * 1e-9),
            units.ratio(first.step / line.step),
            units.seconds(line.compute * 1e-9),
            units.ratio(first.compute / line.compute),
            units.ratio(1.0 + line.contention),
            units.ratio(1.0 + line.collective_contention),
        )
    return shown


def communication_table(communication: Communication) -> Table:
    """The link, and how far the points lie from it."""
    link = communication.link
    shown = Table(
        title=f"all-reduce among {communication.trainers} trainers, in the training loop", title_justify="left", show_header=False
    )
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_row("latency a message", units.seconds(link.latency * 1e-9))
    shown.add_row("bandwidth", f"{link.bandwidth * 1e-9:.3g} Gbit/s")
    shown.add_row("largest distance of a point from this line", units.percent(communication.largest_residual))
    for number, each in enumerate(communication.in_flight, 2):
        shown.add_row(f"each of {number} in flight", f"{units.seconds(each.latency * 1e-9)}, {each.bandwidth * 1e-9:.3g} Gbit/s")
    return shown
