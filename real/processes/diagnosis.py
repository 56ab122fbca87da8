"""Diagnosis: which process broke a launch.

A rank that dies makes the others fail a moment later, with messages that name ports; a rank that
stops makes them run into their timeout. ``blamed`` has the order in which drivers and launchers look.

Errors of a leg of a user's script:

LegFailed     probably the strategy's own fault: out of memory, non-finite values, an exception, a refusal
└── LegLost   the launch broke: a process was killed or fell silent; worth another try
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.digests import atomic_write
from fleetbench.errors import ConfigError, WorkerFailed

if TYPE_CHECKING:
    from real.job.folder import Beat

STOPPED = "was stopped and did not answer, until it was killed"
"""Part of an error about a process that only SIGKILL ended."""
NOTE_PATH = "FLEETBENCH_FAILURE_NOTE"
"""Environment variable with the path of the file in which a server or trainer tells its launcher who failed first."""


class LegFailed(WorkerFailed):
    """A leg cannot run with its strategy; ``where`` names the rank."""


class LegLost(LegFailed):
    """The launch broke during a leg."""


@dataclass(frozen=True, slots=True)
class RankError:
    """Report of a rank about the error that ended it."""

    message: str
    collective: bool
    """Whether it failed in a collective, which is usually another rank's fault."""
    time_ns: int
    config: list[str | None] | None = None
    """Arguments of the ``ConfigError``; ``None`` for other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Announcement of a failure by a rank; see ``real.processes.failures``."""

    rank: int
    what: str
    """Description, such as ``failed at step 3: ValueError: the third layer is odd``."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A process that may have broken a launch."""

    name: str
    """Name in errors, such as ``rank 1`` or ``server 0``."""
    code: int | None = None
    """Exit code, negative for a signal; ``None`` if the process lives, or its end was not seen."""
    is_stopped: bool = False
    says: str | None = None
    """Error that it has reported, or that another process has reported about it."""
    of_peers: bool = False
    """Whether ``says`` is about a broken collective, which is usually another rank's fault."""
    step: str = ""
    """Addition to the description of an exit code, such as `` at step 3``."""
    silence: str = "did not end"
    """Description of a process that has neither ended nor reported an error."""
    since: tuple[object, ...] = ()
    """Sort key among suspects of equal ``order``; the smallest is blamed."""

    @property
    def order(self) -> int:
        """Position in the order of blame, from 0; see ``blamed``."""
        if self.is_stopped:
            return 0
        if self.says is not None:
            return 6 if self.of_peers else 2
        if not self.code:
            return 5
        return 4 if self.code == -signal.SIGTERM else 1 if self.code < 0 else 3

    @property
    def how(self) -> str:
        """Description of how the process failed."""
        if self.is_stopped:
            return STOPPED
        return self.says or (how_it_ended(self.code) + self.step if self.code else self.silence)


def blamed(suspects: Iterable[Suspect]) -> Suspect:
    """Return the process that broke a launch.

    The first of: a process that is stopped (SIGSTOP), was killed, reported an error of its own, failed without a
    report, was told to end by SIGTERM, has not ended, reported a broken collective.
    """
    return min(suspects, key=lambda suspect: (suspect.order, suspect.since))


def read_note(path: Path) -> Suspect | None:
    """Return the process that another one has named for their launcher; ``None`` if there is no such file."""
    if not path.exists():
        return None
    name, says = json.loads(path.read_text(encoding="utf-8"))
    return Suspect(name=name, says=says)


def note_failure(name: str, says: str) -> None:
    """Tell this host's launcher which process failed first. Only the first note counts."""
    path = Path(os.environ.get(NOTE_PATH, ""))
    if path.name and not path.exists():
        with suppress(OSError), atomic_write(path) as partial:  # the launcher may be gone, and its folder with it
            partial.write_text(json.dumps([name, says]), encoding="utf-8")


def diagnose(
    exit_codes: Mapping[int, int],
    errors: Mapping[int, RankError],
    beats: Sequence[Beat],
    now_ns: int,
    log: str,
    stopped: Collection[int] = (),
) -> LegFailed | ConfigError:
    """Return the error that names the rank to blame.

    A worker's ``ConfigError`` is returned as it was.

    Args:
        exit_codes: Exit codes, by rank, of ranks that ended before any was told to; negative for a signal.
        errors: Reported errors, by rank.
        beats: Last sign of life of every rank.
        now_ns: Current time in ns, on the clock of the beats.
        log: Path of the workers' output.
        stopped: Ranks that SIGSTOP or a debugger has stopped.
    """
    for error in errors.values():
        if error.config is not None:
            what, where, value, hint = error.config
            return ConfigError(what or error.message, where, value, hint)
    hint = f"the workers' output: {log}"
    suspects = []
    for rank, beat in enumerate(beats):
        suspect = Suspect(name=f"rank {rank}", code=exit_codes.get(rank), is_stopped=rank in stopped, step=f" at step {beat.step}")
        if (own := errors.get(rank)) is not None:
            says = f"failed{' in a collective' * own.collective} at step {beat.step}: {own.message}"
            suspect = replace(suspect, says=says, of_peers=own.collective, since=(own.time_ns,))
        elif not suspect.code:
            age_s = (now_ns - beat.time_ns) * 1e-9
            silence = f"stopped answering at step {beat.step}, {age_s:.1f} s ago" if beat.pid else "never joined"
            suspect = replace(suspect, silence=silence, since=(beat.pid != 0, beat.leg, beat.step, beat.time_ns))
        suspects.append(suspect)
    found = blamed(suspects)
    if not errors and not exit_codes and any(beat.leg >= 0 for beat in beats):  # it trained, and fell silent
        hint += "; where it evaluates or saves for that long: --set run.timeout='900 s'"
    has_own_error = any(not error.collective for error in errors.values())
    return (LegFailed if has_own_error else LegLost)(found.how, found.name, None, hint)


def require_finite(parts: Mapping[int, Mapping[str, Any]], num_before: int, log: Path, *, profile: bool) -> None:
    """Raise ``LegFailed`` for the first rank whose loss or parameter was NaN or infinite.

    ``parts``: ranks' results of a leg, which measured layer times if ``profile``. ``num_before``: number of steps of
    the process before the leg. ``log``: path of the workers' output.
    """
    found = {rank: part["not_finite"] for rank, part in parts.items() if part["not_finite"] is not None}
    if found:
        rank = min(found, key=lambda rank: (found[rank]["step"], rank))
        alone = ", in a leg of layer times, in which nothing is averaged" if profile else ""
        what = f"not a number: {found[rank]['what']} at step {num_before + found[rank]['step']}{alone}"
        hint = f"give the script a lower learning rate, or a checkpoint to begin from; the workers' output: {log}"
        raise LegFailed(what, f"rank {rank}", None, hint)


def how_it_ended(code: int) -> str:
    """Describe an exit code; a negative one is a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # real-time signals have no name
    return f"was killed by {name}"
