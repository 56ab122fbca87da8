"""Attached: the environment that attaches a command's processes to a job (``real.attach``), and their files.

======================  =========================  ================================================
file                    written by                 content
======================  =========================  ================================================
seen                    ``sitecustomize``          empty; exists once ``sitecustomize`` has run
attached                a process                  empty; exists if a job executes its model
unattached              a process, at its end      reason why no job executes its model
======================  =========================  ================================================
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fleetbench.errors import ConfigError
from real.processes.roles import ATTACH, STRATEGY

NEVER_CALLED = "no model of DistributedDataParallel or fully_shard was called whose parameters an optimizer holds"
FOUR_LINES = "the script calls fleet.init itself, and what it gives to it counts"
WAY_OUT = (
    "put fleet's lines into the script: fleet.init(), model = fleet.distributed_model(model), "
    "optimizer = fleet.distributed_optimizer(optimizer), and no DistributedDataParallel"
)
_UNREAD = "no Python process here has read PYTHONPATH, as with python -I or -E, or in a container"
_UNCONFIRMED = (
    "note: no process on this host has said that it trains by the strategy; rank 0's output shows the strategy's box at its first step "
    "if it does, and without that the script has trained as by itself"
)
_SITE = Path(__file__).parents[1] / "attach" / "site"
_ATTACHED, _UNATTACHED, _SEEN = "attached", "unattached", "seen"


def attached_environment(folder: Path, strategy: Path | None = None, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for a command whose processes should attach to the job of ``folder``.

    ``strategy``: file of the strategy by which they train.
    """
    path = os.pathsep.join(filter(None, [str(_SITE), base.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, ATTACH: str(folder)} | ({} if strategy is None else {STRATEGY: str(strategy.resolve())})


def note_attached() -> None:
    """Record that a job executes this process's model."""
    _note(_ATTACHED, "")


def note_unattached(why: str) -> None:
    """Record why no job executes a model of this process.

    ``NEVER_CALLED`` replaces no other reason, because launchers, which have no model, record it, too.
    """
    folder = Path(os.environ[ATTACH])
    if why != NEVER_CALLED or not (folder / _UNATTACHED).exists():
        _note(_UNATTACHED, why)


def why_unattached(folder: Path) -> str | None:
    """Return the reason why no process of a command has attached to a job.

    Return ``None`` if one has, or if there is no folder.
    """
    if not folder.is_dir() or (folder / _ATTACHED).exists():
        return None
    if not (folder / _SEEN).exists():
        return _UNREAD
    with suppress(OSError):
        return (folder / _UNATTACHED).read_text(encoding="utf-8")
    return NEVER_CALLED


def check_ordered(strategy: Path) -> None:
    """Raise ``ConfigError`` for a file with a strategy that requires changes in the script."""
    from fleetbench.strategy import DistributedStrategy  # which a process that attaches loads later, if at all

    if DistributedStrategy.load(strategy).mode == "ps":
        hint = "parameter servers need calls in the script, from fleet.init to fleet.stop_worker"
        raise ConfigError("is a strategy of parameter servers", "--strategy", str(strategy), hint)


def refuse_unattached(folder: Path, strategy: Path, *, is_elsewhere: bool = False) -> None:
    """Raise ``ConfigError`` if a job has ended and none of its models has used the strategy.

    ``is_elsewhere``: whether its processes may have run on other hosts; then only a note is printed.
    """
    why = why_unattached(folder)
    if why is not None and is_elsewhere:
        print(_UNCONFIRMED, file=sys.stderr, flush=True)  # noqa: T201  # a launcher's word
    if why is not None and not is_elsewhere:
        hint = "let it load the file: fleet.init(DistributedStrategy.load(FILE))" if why == FOUR_LINES else WAY_OUT
        hint = "install fleetbench there: python -m pip install fleetbench" if "cannot import fleetbench" in why else hint
        hint = f"start Python without -I and -E, on this host, or {WAY_OUT}" if why == _UNREAD else hint
        raise ConfigError(f"was not applied: {why}", "--strategy", str(strategy), hint)


def _note(name: str, text: str) -> None:
    with suppress(OSError):  # the job has ended, or is on another host
        Path(os.environ[ATTACH], name).write_text(text, encoding="utf-8")
