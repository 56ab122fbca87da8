"""``fleetbench profile``: what do layers, links and stragglers cost on this machine?"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.cli import progress, your_script
from fleetbench.cli.options import Commands, add_command, add_command_line, add_experiment, add_json, load_experiment, number
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.errors import ConfigError, printable
from fleetbench.quantities import counted

if TYPE_CHECKING:
    from rich.table import Table

    from fleetbench.cluster import Link
    from fleetbench.experiment import Experiment
    from fleetbench.measurements import StragglerFit
    from fleetbench.plan.layers import LayerTable
    from fleetbench.profile import Profile
    from real.profile.measuring import Taken

_SECONDS = 10.0
_MOST_SOURCES = 3
"""Largest number of files named in a comment."""
_MOST_LAYERS = 12
"""Largest number of layers in the printed table; the file holds all of them."""
_NO_SERVERS = (
    "no server runs: layers, updates and stragglers are measured in trainers that meet in collectives; sim takes a server's work on a "
    "push from the update, and nothing for reading and answering it"
)


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "profile", "measure layers, communication and stragglers here, for sim to read", run)
    add_experiment(parser)
    seconds = number("a number of seconds above zero", math.ulp(0.0))
    short = f"time limit for each of the short runs; default: {_SECONDS:g}"
    parser.add_argument("--seconds", type=seconds, default=_SECONDS, metavar="S", help=short)
    source = (
        "measure nothing: take stragglers from a run's folder, its steps.parquet, a table (Parquet or CSV with the columns rank, step "
        "and compute_s), or traces of torch.profiler (files, or folders of them), and print [[cluster.stragglers]]"
    )
    parser.add_argument("--from", type=Path, nargs="+", metavar="RUN_OR_TRACE", dest="source", help=source)
    add_json(parser, "the profile, or the stragglers,")
    add_command_line(parser)
    parser.epilog = your_script.EPILOG
    parser.set_defaults(interrupted="the workers were stopped, and no profile was stored")


def run(arguments: argparse.Namespace) -> int:
    """Measure a profile, write its folder, and print the results."""
    if arguments.source is not None:
        return _fit_stragglers(arguments)
    arguments.command_line = arguments.command_line or your_script.command_of_job(arguments)
    if arguments.command_line:
        return your_script.drive_script(arguments, _profile_script)
    your_script.refuse_workdir(arguments)
    experiment = load_experiment(arguments)
    if experiment.strategy.mode == "ps":
        say(f"note: {_NO_SERVERS}")
    from real.profile.measuring import measure_profile

    with progress.steps("profile") as advance:
        taken = measure_profile(experiment, seconds=arguments.seconds, stragglers=True, progress=advance)
    return show(taken, arguments)


def _profile_script(arguments: argparse.Namespace, command: tuple[str, ...], base: Experiment) -> int:
    from real.job.script_session import ScriptSession
    from real.profile.measuring import profile_script

    your_script.note_files(arguments)
    with (
        progress.steps("profile") as advance,
        ScriptSession(command, base, workdir=arguments.workdir) as session,
    ):
        taken = profile_script(session, seconds=arguments.seconds, stragglers=True, progress=advance)
    for note in session.notes:
        say(f"note: {note}")
    return show(taken, arguments)


def show(taken: Taken, arguments: argparse.Namespace, said: str = "") -> int:
    """Write a profile's folder, and print the results and then ``said``."""
    from fleetbench.config import encode
    from fleetbench.experiment import Experiment
    from fleetbench.report.folder import save_profile
    from fleetbench.utilisation import utilisation

    folder = save_profile(taken.experiment, taken.profile, taken.runs, arguments.out)
    simulated = folder / taken.profile.experiment_file
    table, memory = own_table(taken.experiment, taken.profile), taken.profile.memory
    step_s = (table.forward_ns + table.backward_ns + own_update(taken.experiment, table)) / 1e9
    one = utilisation(Experiment.load(simulated), step_s, None if memory is None else memory.peak)
    if arguments.json:
        more = {"per_trainer": dataclasses.asdict(one), "folder": str(folder)}
        emit(json.dumps(encode(taken.profile) | more, indent=1))
        say(f"profile: {folder}")
        return 0
    print_profile(taken.experiment, taken.profile)
    emit(f"{one.line}; without communication")
    if said:
        emit(said)
    emit(f"profile: {folder / 'profile.toml'}")
    emit(f"simulate with it: fleetbench sim {simulated}")
    return 0


def _fit_stragglers(arguments: argparse.Namespace) -> int:
    """Fit stragglers for ``--from``, and print them in the format of an experiment file."""
    for given, name in (
        (arguments.experiment, "EXPERIMENT.toml"),
        (arguments.overrides, "--set"),
        (arguments.seed is not None, "--seed"),
        (arguments.command_line, "--"),
    ):
        if given:
            raise ConfigError("nothing runs and nothing is measured beside --from", name, hint=f"drop {name}, or --from")
    from fleetbench.config import encode
    from fleetbench.fitting.stragglers import fit_source

    fit = fit_source(arguments.source)
    emit(json.dumps(encode(fit), indent=1) if arguments.json else _as_toml(fit, arguments.source))
    return 0


def _as_toml(fit: StragglerFit, sources: Sequence[Path]) -> str:
    """Return the entries as TOML, with the findings as comments first."""
    from fleetbench.config import encode

    more = f" and {len(sources) - _MOST_SOURCES} more" if len(sources) > _MOST_SOURCES else ""
    said = [f"from {', '.join(map(str, sources[:_MOST_SOURCES]))}{more}", *fit.statements]
    lines = [f"# {printable(text, lines=False)}" for text in said]
    lines.append(f"# compute at X = 0: {units.seconds(fit.base * 1e-9)} a step (median of all ranks: {units.seconds(fit.median * 1e-9)})")
    if not fit.entries:
        lines.append("# no entry: no straggler was found")
    for entry in encode(fit).get("entries", ()):
        lines += ["", "[[cluster.stragglers]]", *(f"{name} = {json.dumps(value)}" for name, value in entry.items())]  # TOML, on a line
    return "\n".join(lines)


def print_profile(experiment: Experiment, profile: Profile) -> None:
    """Print all parts of a profile; of its layer tables, only the one for the experiment's settings."""
    table = own_table(experiment, profile)
    emit_table(layers_table(table))
    emit_table(costs_table(experiment, table, profile))
    for line in profile.threads:
        step, compute, slower = units.seconds(line.step * 1e-9), units.seconds(line.compute * 1e-9), units.ratio(1.0 + line.contention)
        emit(f"{counted(line.thread_num, 'thread')} a trainer: a step takes {step}, compute {compute}, and {slower} that beside traffic")
    if profile.communication is not None:
        link, residual = profile.communication.link, units.percent(profile.communication.largest_residual)
        emit(f"all-reduce among {profile.communication.trainers} trainers: {_link(link)}; the farthest point is {residual} from this line")
        for count, each in enumerate(profile.communication.in_flight, 2):
            emit(f"each of {count} in flight: {_link(each)}")
    if profile.gradient_noise is not None:
        emit(profile.gradient_noise.statement)
    if profile.busy:
        emit(f"warning: {profile.busy}; profile again when it is quiet")
    for note in profile.notes:
        emit(f"note: {note}")
    if profile.stragglers is not None:
        for statement in profile.stragglers.statements:
            emit(f"stragglers: {statement}")


def own_table(experiment: Experiment, profile: Profile) -> LayerTable:
    """Return the profile's layer table for the experiment's settings, or its first one."""
    from fleetbench.profile import compute_key

    return next((table for table in profile.tables if table.key == compute_key(experiment)), profile.tables[0])


def layers_table(table: LayerTable) -> Table:
    """Return a table of the layers that take longest, in backward order of readiness."""
    ordered = [layer for layer in reversed(table.layers) if layer.gradients]
    longest = sorted(ordered, key=lambda layer: -(layer.forward + layer.backward))[:_MOST_LAYERS]
    left = len(ordered) - len(longest)
    title = f"layers in backward order of readiness{f', the {len(longest)} longest of {len(ordered)}' if left else ''}"
    shown = new_table(title, "layer", "parameters", "forward", "± MAD", "backward", "± MAD", "ready", "activations")
    for layer in (layer for layer in ordered if layer in longest):
        shown.add_row(
            layer.name or "(the model itself)",
            f"{sum(gradient.numel for gradient in layer.gradients):,}",
            *(units.seconds(time * 1e-9) for time in (layer.forward, layer.forward_mad, layer.backward, layer.backward_mad)),
            units.seconds(max(gradient.ready for gradient in layer.gradients) * 1e-9),
            units.size(layer.activation_bytes),
        )
    return shown


def own_update(experiment: Experiment, table: LayerTable) -> int:
    """Return the time in ns of one trainer's optimizer step, which covers only its shard if the model is sharded."""
    from fleetbench.plan.sharding import degree_of

    strategy = experiment.strategy
    return table.update // (degree_of(strategy.sharding_configs, experiment.cluster.trainers) if strategy.sharding else 1)


def costs_table(experiment: Experiment, table: LayerTable, profile: Profile) -> Table:
    """Return a table of the costs of a whole step, and of memory."""
    local = (
        ()
        if experiment.strategy.sharding
        else (
            ("forward and backward of local steps", round(table.local_compute * (table.forward_ns + table.backward_ns))),
            ("the first ones after an averaging, beyond that", table.resume),
            ("optimizer under Local SGD", table.local_update),
            ("averaging under Local SGD, without its communication", table.merge),
        )
    )
    shown = new_table("a step", "", "cost", show_header=False)
    for name, time in (
        ("forward", table.forward_ns),
        ("backward", table.backward_ns),
        ("optimizer", own_update(experiment, table)),
        ("reading, and the loop's own work", table.read),
        *local,
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


def _link(link: Link) -> str:
    return f"{units.seconds(link.latency * 1e-9)} a message, {link.bandwidth * 1e-9:.3g} Gbit/s"
