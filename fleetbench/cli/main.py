"""``fleetbench``: reads the command line, runs one command, and turns its end into an exit code."""

import argparse
import contextlib
import errno
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fleetbench import __version__
from fleetbench.cli import calibrate, compare, doctor, estimate, evaluate, launch, profile, real, report, sim, testbed, tune, why
from fleetbench.cli.output import flush, replace_unprintable, say
from fleetbench.cli.your_script import split_command
from fleetbench.errors import ConfigError, EnvironmentLacks, FleetbenchError, Interrupted
from fleetbench.name_clashes import refuse_strangers

_REFUSALS = "ENOSPC EDQUOT EFBIG EIO EROFS EMFILE ENFILE ENAMETOOLONG EACCES EPERM ENOENT"
"""Names of the errors that the system may answer to any program that writes files."""

COMMANDS = (why, sim, real, tune, profile, report, compare, launch, evaluate, testbed, doctor, calibrate, estimate)

DESCRIPTION = "Simulate, measure and tune data-parallel training."
EPILOG = """\
Without a file, sim, real and tune run the built-in quickstart.
exit codes: 0 done, 1 a gate failed, 2 bad usage or configuration, 3 the environment lacks something,
4 a worker failed, 130 interrupted
"""


class _Parser(argparse.ArgumentParser):
    """Bad usage is an error as any other."""

    def error(self, message: str) -> NoReturn:
        """Raise it as ``ConfigError``."""
        script = "; a script's command follows `--`" if message.startswith("unrecognized") else ""
        raise ConfigError(message, self.prog, hint=f"{self.prog} --help{script}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="fleetbench", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fleetbench {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``--help`` and ``--version`` leave through argparse's ``SystemExit``.

    What is no ``FleetbenchError`` is a bug of ours and keeps its traceback.
    """
    try:
        replace_unprintable()
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
        with contextlib.suppress(OSError):  # the reader, or the terminal, has gone
            say(f"interrupted: {arguments.interrupted}")
        return Interrupted.exit_code
    except FleetbenchError as error:
        return _failed(error)
    except (MemoryError, UnicodeEncodeError, OSError) as error:
        return _failed(_of_the_machine(error))
    return code


def _of_the_machine(error: MemoryError | UnicodeEncodeError | OSError) -> FleetbenchError:
    """What is to be said where the machine refuses something; raises what is a bug of ours."""
    if isinstance(error, MemoryError):
        return EnvironmentLacks(f"too little memory: {error}", "this machine", hint="fewer trainers, steps or layers need less")
    if isinstance(error, UnicodeEncodeError):
        hint = "use ASCII, or a locale of UTF-8: LC_ALL=C.UTF-8 fleetbench ..."
        return ConfigError("is no text in UTF-8", "fleetbench", ascii(error.object), hint)
    if errno.errorcode.get(error.errno or 0) not in _REFUSALS.split():
        raise error
    hint = "make room there, see its permissions and `umask`, or name another folder: --out DIR, or TMPDIR for what is temporary"
    return EnvironmentLacks(str(error.strerror), str(error.filename or "this machine"), hint=hint)


def _failed(error: FleetbenchError) -> int:
    say(f"error: {error}")
    return error.exit_code


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Batch systems' SIGTERM and a closed terminal's SIGHUP end a command as Ctrl-C does: workers end, temporary folders go.

    What the caller ignores, as nohup does SIGHUP, stays ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, interrupt) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


if __name__ == "__main__":
    sys.exit(main())
