"""fleetbench: simulate, measure and tune data-parallel training.

Users import from this module only. Names are loaded on first use, so that importing the package does
not import torch or numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetbench.experiment import Experiment as Experiment
    from fleetbench.fitting.stragglers import fit_source
    from fleetbench.report.compare import compare_runs as compare_runs
    from fleetbench.store import load_run as load_run
    from fleetbench.store import load_runs as load_runs
    from fleetbench.strategy import DistributedStrategy as DistributedStrategy
    from real.estimate.step import estimated
    from real.fleet import fleet as fleet
    from real.job.session import measure as measure
    from real.profile.measuring import ensure_profile as ensure_profile
    from sim.learning.virtual_training import train
    from sim.many.seeds import over_seeds as over_seeds
    from sim.many.sweep import sweep as sweep
    from sim.many.what_if import what_if as what_if
    from sim.run import simulate as simulate
    from tuner.simulated.answer import tune_simulated as tune_simulated
    from tuner.simulated.sizes import tune_sizes as tune_sizes
    from tuner.tune import tune as tune

    estimate = estimated
    fit_stragglers = fit_source
    learn = train

__version__ = "0.1.0"

_HOMES = {
    "DistributedStrategy": ("fleetbench.strategy", "DistributedStrategy"),
    "Experiment": ("fleetbench.experiment", "Experiment"),
    "compare_runs": ("fleetbench.report.compare", "compare_runs"),
    "ensure_profile": ("real.profile.measuring", "ensure_profile"),
    "estimate": ("real.estimate.step", "estimated"),
    "fit_stragglers": ("fleetbench.fitting.stragglers", "fit_source"),
    "fleet": ("real.fleet", "fleet"),
    "learn": ("sim.learning.virtual_training", "train"),
    "load_run": ("fleetbench.store", "load_run"),
    "load_runs": ("fleetbench.store", "load_runs"),
    "measure": ("real.job.session", "measure"),
    "over_seeds": ("sim.many.seeds", "over_seeds"),
    "simulate": ("sim.run", "simulate"),
    "sweep": ("sim.many.sweep", "sweep"),
    "tune": ("tuner.tune", "tune"),
    "tune_simulated": ("tuner.simulated.answer", "tune_simulated"),
    "tune_sizes": ("tuner.simulated.sizes", "tune_sizes"),
    "what_if": ("sim.many.what_if", "what_if"),
}
__all__ = list(_HOMES)  # derived, so that both have the same names


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    importlib.import_module("fleetbench.name_clashes").refuse_strangers()
    return getattr(importlib.import_module(module), attribute)
