"""``fleetbench``: reads the command line, runs one command, and turns its outcome into an exit code."""

import argparse
import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fleetbench import __version__
from fleetbench.cli import calibrate, compare, doctor, estimate, evaluate, launch, profile, real, report, sim, testbed, tune, why
from fleetbench.cli.output import flush, say
from fleetbench.cli.your_script import split_command
from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, Interrupted
from fleetbench.name_clashes import refuse_strangers

_OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.EACCES,
    errno.EPERM,
)  # fmt: skip
"""Error numbers that the system may return to any program that writes files."""

COMMANDS = (why, sim, real, tune, profile, report, compare, launch, evaluate, testbed, doctor, calibrate, estimate)

DESCRIPTION = "Simulate, measure and tune data-parallel training."
EPILOG = """\
Without a file, sim, real and tune run the built-in quickstart.
exit codes: 0 done, 1 a gate failed, 2 bad usage or configuration, 3 the environment lacks something,
4 a worker failed, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    """Parser that treats bad usage like any other error."""

    def error(self, message: str) -> NoReturn:
        """Raise ``ConfigError`` with the message."""
        script = "; a script's command follows `--`" if message.startswith("unrecognized") else ""
        raise ConfigError(message, self.prog, hint=f"{self.prog} --help{script}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="fleetbench", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fleetbench {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``--help`` and ``--version`` raise argparse's ``SystemExit``.

    Any exception other than ``FleetbenchError`` is our bug and keeps its traceback.
    """
    try:
        own, command = split_command(sys.argv[1:] if argv is None else argv)
        arguments = build_parser().parse_args(own)
        arguments.command_line = command
    except SystemExit:
        flush()
        raise
    except FleetbenchError as refused:
        return _failed(refused)
    try:
        refuse_strangers()
        with _signals_interrupt():
            code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        say(f"interrupted: {arguments.interrupted}")
        return Interrupted.exit_code
    except FleetbenchError as error:
        return _failed(error)
    except MemoryError as error:
        return _failed(
            EnvironmentLacks(f"too little memory: {error}".rstrip(": "), "this machine", hint="fewer trainers, steps or layers need less")
        )
    except OSError as error:
        if error.errno not in _OF_THE_MACHINE:
            raise
        hint = "make room there, see its permissions, or name another folder: --out DIR, or TMPDIR for what is temporary"
        return _failed(EnvironmentLacks(str(error.strerror), str(error.filename or "this machine"), hint=hint))
    return code


def _failed(error: FleetbenchError) -> int:
    say(f"error: {error}")
    return error.exit_code


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM of batch systems and SIGHUP of a closed terminal like Ctrl-C, which cleans up.

    Signals that the caller ignores, as nohup ignores SIGHUP, stay ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread set handlers
        yield
        return
    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, interrupt) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    sys.exit(main())
