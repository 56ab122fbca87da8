"""``fleetbench why``: why is my unchanged script slow, and what would help?"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress, your_script
from fleetbench.cli.options import Commands, add_command, add_command_line, add_json, add_overrides, load_experiment, number, whole
from fleetbench.cli.output import columns, emit, say
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from tuner.why.explanation import Explanation

_SECONDS = 60.0
_FILE = "why.json"


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "why", "look at an unchanged training script: why is it slow, and what would help?", run)
    text = "traces of torch.profiler (files, or folders of them), one for each rank, instead of a command"
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help=text)
    add_overrides(parser, "such as run.timeout='300 s'")
    seconds = number("a number of seconds above zero", math.ulp(0.0))
    text = f"about how long to observe, from the command's start; default: {_SECONDS:g}"
    parser.add_argument("--seconds", type=seconds, default=_SECONDS, metavar="S", help=text)
    parser.add_argument("--trace", action="store_true", help="record some steps with torch.profiler; default: only on GPUs")
    above = number("a number above zero", math.ulp(0.0))
    parser.add_argument("--link", type=above, metavar="FACTOR", help="with traces: as if links were FACTOR times as fast")
    parser.add_argument("--ranks", type=whole(2), metavar="N", help="with traces: as if there were N ranks")
    percent = number("a percentage above zero", math.ulp(0.0))
    text = "exit with 1 if more than PERCENT of a step is neither compute nor update"
    parser.add_argument("--fail-above", type=lambda text: percent(text.removesuffix("%")), metavar="PERCENT", help=text)
    text = "say what became slower since an earlier answer: its folder, or its why.json"
    parser.add_argument("--against", type=Path, metavar="OLD", help=text)
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where the answer's folder goes; default: runs")
    add_json(parser, "the answer")
    add_command_line(parser)
    parser.epilog = your_script.EPILOG
    parser.set_defaults(interrupted="the command was stopped", experiment=None, strategy=None, seed=None)


def run(arguments: argparse.Namespace) -> int:
    """Observe a command or read traces, store the answer, and print the answer and its path."""
    if bool(arguments.command_line) == bool(arguments.traces):
        hint = "fleetbench why -- torchrun --nproc-per-node 2 train.py, or fleetbench why TRACE.json ..."
        raise ConfigError("takes either a command that trains, or traces", "fleetbench why", hint=hint)
    old = None if arguments.against is None else _earlier(arguments.against)
    if arguments.traces:
        from tuner.why.from_traces import explain_traces

        your_script.refuse_workdir(arguments)
        arguments.experiment = str(resources.files("fleetbench").joinpath("script.toml"))
        base = load_experiment(arguments).replace(name="traces")
        return show(explain_traces(arguments.traces, "TRACE", link=arguments.link, ranks=arguments.ranks), arguments, base, old)
    for option, value in (("--link", arguments.link), ("--ranks", arguments.ranks)):
        if value is not None:
            raise ConfigError("is for traces; a command has the links and ranks that it has", option, f"{value:g}", "drop it")
    return your_script.drive_script(arguments, partial(_explain, old))


def _explain(old: dict[str, Any] | None, arguments: argparse.Namespace, command: tuple[str, ...], base: Experiment) -> int:
    from tuner.why.explaining import explain

    your_script.note_files(arguments, often="")
    with progress.stages() as advance:
        found = explain(
            command,
            base.run,
            seconds=arguments.seconds,
            traces=True if arguments.trace else None,
            workdir=arguments.workdir,
            progress=advance,
        )
    return show(found, arguments, base, old)


def show(found: Explanation, arguments: argparse.Namespace, base: Experiment, old: dict[str, Any] | None) -> int:
    """Store an answer and print it.

    Returns 1 if more of a step than ``--fail-above`` is neither compute nor update.
    """
    from fleetbench.report.why import changes_since, data_of, text_of, text_of_changes, write_page
    from fleetbench.store import new_folder

    data = data_of(found)
    if old is not None:
        data["since"] = changes_since(data, old)
    with new_folder(base, "why", arguments.out) as (folder, _):
        (folder / _FILE).write_text(json.dumps(data, indent=1), encoding="utf-8")
        page = write_page(found, folder)
    if arguments.json:
        emit(json.dumps(data | {"folder": str(folder)}, indent=1))
    else:
        emit(text_of(found, columns()))
        emit(f"  details: {page}")
        if old is not None:
            emit(text_of_changes(data["since"], columns()))
    wasted = 100 * (1 - found.shares.compute_s / found.shares.step_s)
    if arguments.fail_above is not None and wasted > arguments.fail_above:
        say(f"{wasted:.0f} % of a step are not compute, more than --fail-above {arguments.fail_above:g}")
        return 1
    return 0


def _earlier(path: Path) -> dict[str, Any]:
    """Return an earlier answer. Raises ``ConfigError`` if the file is not an answer of ``fleetbench why``."""
    from fleetbench.digests import read_text
    from fleetbench.report.why import changes_since

    file = path / _FILE if path.is_dir() else path
    hint = "fleetbench why writes it into its folder"
    try:
        data = json.loads(read_text(file, hint))
        changes_since(data, data)
    except (ValueError, TypeError, KeyError, ZeroDivisionError):
        raise ConfigError("is no answer of fleetbench why", "--against", str(file), hint) from None
    return dict(data)
