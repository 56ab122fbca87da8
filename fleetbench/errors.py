"""Every error a user can meet, with the exit code of the command line.

FleetbenchError
├── GateFailed          1    a gate asked for on the command line failed
├── ConfigError         2    bad usage or configuration
├── EnvironmentLacks    3    the machine lacks something the run needs
├── WorkerFailed        4    a worker died, hung or raised
└── Interrupted       130    Ctrl-C

An error can be rebuilt from its ``args`` alone, because SimPy re-raises a process's exception as
``type(e)(*e.args)``.
"""

from typing import ClassVar

LONGEST = 1000
"""Largest number of characters of a value that a message shows."""
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that move a terminal's cursor, change its state, end a line or change the direction of text."""
_SPELLED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_SPELLED_IN_LINES = {code: spelled for code, spelled in _SPELLED.items() if chr(code) not in "\n\t"}


def printable(text: str, *, lines: bool = True) -> str:
    """Return the text with control characters as Python escapes, except line breaks and tabs if ``lines``."""
    return text.translate(_SPELLED_IN_LINES if lines else _SPELLED)


class FleetbenchError(Exception):
    """Base class of all errors: what is wrong, where, the value, and a hint on how to fix it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, where: str | None = None, value: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where, value, hint)
        self.what = what
        self.where = where
        self.value = value
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.value is not None:
            text += f" (got {self.value if len(self.value) <= LONGEST else f'{self.value[:LONGEST]} ...'})"
        if self.hint:
            text += f"\nHINT: {self.hint}"
        return printable(text)


class GateFailed(FleetbenchError):  # noqa: N818  # says what happened, and reads so in `except`
    """A comparison or evaluation exceeded the tolerance the user asked for."""

    exit_code = 1


class ConfigError(FleetbenchError):
    """A file, flag or combination of settings that cannot be executed as written."""

    exit_code = 2


class EnvironmentLacks(FleetbenchError):  # noqa: N818  # says what happened, and reads so in `except`
    """Something outside the program is missing: a device, a port, a file system."""

    exit_code = 3


class WorkerFailed(FleetbenchError):  # noqa: N818  # says what happened, and reads so in `except`
    """A worker process died, hung or raised; ``where`` names the rank."""

    exit_code = 4


class Interrupted(FleetbenchError):  # noqa: N818  # says what happened, and reads so in `except`
    """The user stopped the command."""

    exit_code = 130
