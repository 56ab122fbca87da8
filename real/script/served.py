"""Served: a script whose trainers have parameter servers. No leg runs in it, and the driver is told so at once."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import NoReturn

from fleetbench.errors import ConfigError
from real.processes.roles import role_of
from real.script.folder import ScriptSide
from real.script.watch import rank_error


def refuse_served() -> NoReturn:
    """Raise ``ConfigError``, which the driver hands on, before the script trains to its end in vain."""
    what = "a script with parameter servers is neither profiled nor tuned: legs change the strategies of trainers that meet in collectives"
    error = ConfigError(what, "strategy.mode", "'ps'", "compare runs of fleetbench sim or real with different a_sync_configs")
    ScriptSide.of_environment().fail(role_of(os.environ).rank, asdict(rank_error(error)))
    raise error
