"""fleetbench: simulate, measure and tune data-parallel training.

Users import from here only. Names are loaded on first use, so that importing the package costs
neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment
    from fleetbench.report.compare import compare_runs
    from fleetbench.strategy import DistributedStrategy
    from real.fleet import fleet
    from real.profile.profiling import ensure_profile
    from real.run import measure
    from sim.run import simulate
    from tuner.tune import tune

__all__ = ["DistributedStrategy", "Experiment", "compare_runs", "ensure_profile", "fleet", "measure", "simulate", "tune"]
__version__ = "0.1.0"

_HOMES = {
    "DistributedStrategy": ("fleetbench.strategy", "DistributedStrategy"),
    "Experiment": ("fleetbench.experiment", "Experiment"),
    "compare_runs": ("fleetbench.report.compare", "compare_runs"),
    "ensure_profile": ("real.profile.profiling", "ensure_profile"),
    "fleet": ("real.fleet", "fleet"),
    "measure": ("real.run", "measure"),
    "simulate": ("sim.run", "simulate"),
    "tune": ("tuner.tune", "tune"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), attribute)
