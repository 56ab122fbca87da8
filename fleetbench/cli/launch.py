"""``fleetbench launch``: starts a training script, one process per trainer, or prints a script that starts it."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleetbench.cli import your_script
from fleetbench.cli.options import Commands, add_command, number, whole
from fleetbench.cli.output import echo, emit, say
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted

FORMS = ("slurm", "torchrun", "kubernetes")


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "launch", "start a training script on several processes", run)
    nproc = "number of trainers, all here; torchrun and srun start them on several nodes"
    parser.add_argument("--nproc", type=whole(1), metavar="N", help=nproc)
    servers = "parameter servers, with --workers: how many, all here, or where; the same line on every host"
    parser.add_argument("--servers", metavar="S|HOST:PORT,...", help=servers)
    workers = "trainers of parameter servers: how many, all here, or on which host"
    parser.add_argument("--workers", metavar="W|HOST:N,...", help=workers)
    startup, at_least_1 = "seconds to wait for all servers and trainers; default: 300", number("a number of seconds, at least 1", 1)
    parser.add_argument("--startup-timeout", type=at_least_1, default=300.0, metavar="S", help=startup)
    parser.add_argument("--log-dir", type=Path, default=Path("log"), metavar="DIR", help="folder for one log file per rank; default: log")
    strategy = "a strategy file such as recommended.toml for the script's DistributedDataParallel; without --nproc, a command follows --"
    parser.add_argument("--strategy", type=Path, metavar="FILE", help=strategy)
    restarts = "elastic workers (localsgd_configs.elastic): the job goes on without one that dies, and starts one again up to N times"
    parser.add_argument("--restarts", type=whole(0), metavar="N", help=restarts)
    form = "start nothing: print what starts an experiment's trainers there. SCRIPT is EXPERIMENT.toml then"
    parser.add_argument("--print", choices=FORMS, dest="form", help=form)
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its own arguments; with --print: -- SCRIPT ARGS")
    parser.set_defaults(interrupted="all trainers were stopped")


def run(arguments: argparse.Namespace) -> int:
    """Start the trainers and wait for them. Raises ``WorkerFailed`` with the failed rank."""
    if arguments.form is not None:
        return _print_template(arguments)
    if arguments.servers is not None or arguments.workers is not None:
        return _launch_served(arguments)
    if arguments.strategy is not None and arguments.nproc is None:
        return _run_command(arguments)
    usage = "fleetbench launch --nproc 2 train.py [its arguments]"
    if arguments.nproc is None:
        raise ConfigError("how many trainers?", "--nproc", hint=usage)
    _require_script(arguments.script, usage)
    if arguments.restarts is not None:
        return _launch_elastic(arguments)
    from real.job.launcher import launch_script

    emit(f"{arguments.script}: {counted(arguments.nproc, 'trainer')}, rendezvous a file, logs in {arguments.log_dir}")
    script, logs = [arguments.script, *arguments.arguments], arguments.log_dir
    joined = launch_script(arguments.nproc, script, log_dir=logs, echo=echo, strategy=arguments.strategy)
    if not joined and arguments.nproc > 1:
        say("note: no trainer called fleet.init: unless the script connects them by other means, each has trained alone")
    return 0


def _run_command(arguments: argparse.Namespace) -> int:
    from real.attach.command import run_command

    words = [arguments.script or "", *arguments.arguments]
    command = words[1:] if words[0] == your_script.SEPARATOR else words
    if not any(command):
        hint = "fleetbench launch --strategy recommended.toml -- torchrun --nproc-per-node 2 train.py"
        raise ConfigError("no command follows it, and no --nproc", "--strategy", str(arguments.strategy), hint)
    your_script.require_script(command, None)
    run_command(command, arguments.strategy)
    return 0


def _launch_elastic(arguments: argparse.Namespace) -> int:
    if arguments.strategy is not None:
        hint = "the script takes its strategy itself: fleet.init(DistributedStrategy.load(FILE))"
        raise ConfigError("is for a script's DistributedDataParallel, which is not elastic", "--strategy", str(arguments.strategy), hint)
    from real.elastic.launching import launch_elastic

    workers, logs = counted(arguments.nproc, "elastic worker"), arguments.log_dir
    emit(f"{arguments.script}: {workers}, rendezvous torchft's lighthouse, logs in {logs}")
    script = [arguments.script, *arguments.arguments]
    launch_elastic(arguments.nproc, script, restarts=arguments.restarts, log_dir=logs, echo=echo, say=say)
    return 0


def _launch_served(arguments: argparse.Namespace) -> int:
    usage = "fleetbench launch --servers 1 --workers 2 train.py [its arguments]"
    if None in (arguments.servers, arguments.workers) or arguments.strategy is not None or arguments.nproc is not None:
        hint = f"{usage}; a script of servers takes its strategy itself: fleet.init(DistributedStrategy.load(FILE))"
        raise ConfigError("go together, and with neither --nproc nor --strategy", "--servers, --workers", hint=hint)
    _require_script(arguments.script, usage)
    from real.job.served_launcher import launch_placed
    from real.servers.hosts import place

    placement = place(arguments.servers, arguments.workers)
    on_hosts = f" on {len(placement.hosts)} hosts" if placement.is_spread else ""
    servers = counted(len(placement.endpoints), "server") + (f" ({', '.join(placement.endpoints)})" if placement.is_spread else "")
    emit(f"{arguments.script}: {servers}, {counted(len(placement.workers), 'trainer')}{on_hosts}, logs in {arguments.log_dir}")
    launch_placed(
        placement,
        [arguments.script, *arguments.arguments],
        log_dir=arguments.log_dir,
        startup_timeout_s=arguments.startup_timeout,
        echo=echo,
    )
    return 0


def _require_script(script: str | None, usage: str) -> None:
    if script is None or not Path(script).is_file():
        raise ConfigError("no such script", "SCRIPT", repr(script), usage)


def _print_template(arguments: argparse.Namespace) -> int:
    from fleetbench.cli.templates import render_template
    from fleetbench.experiment import Experiment

    path = arguments.script
    if path is None or not path.endswith(".toml"):
        hint = f"fleetbench launch --print {arguments.form} experiment.toml -- train.py [its arguments]"
        raise ConfigError("an experiment says how many nodes and trainers there are", "--print", repr(path), hint)
    script = arguments.arguments[1:] if arguments.arguments[:1] == ["--"] else arguments.arguments
    emit(render_template(arguments.form, Experiment.load(path), Path(path), script).rstrip("\n"))
    return 0
