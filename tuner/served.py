"""Served: modes of training with parameter servers, which are compared instead of a search space.

Fleet's modes are synchronous, asynchronous with pushes of several gradients, and GeoSGD. Each trains
differently, so its step time alone says little.
"""

import dataclasses
import math
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.servers.rules import WAIT_NS
from fleetbench.profile import table_for
from fleetbench.strategy import DistributedStrategy
from sim.servers.simulate import hosts_of
from tuner.budget import largest_geo_k
from tuner.learning import Progress
from tuner.notes import left_out
from tuner.search import Search, StepS, Window, search_listed, with_steps
from tuner.space import name_of

MERGED = (4, 16)
"""Numbers of gradients per push that are tried in the asynchronous mode."""
_ROUNDS = 2
"""Number of exchanges of GeoSGD in one trial."""


def refuse_unpriced(experiment: Experiment) -> None:
    """Raise ``ConfigError`` if real runs cannot compare the modes, or if the link to the servers is unknown."""
    if experiment.run.device == "emulated":
        hint = 'run.device = "cpu" trains a registry model; `fleetbench tune --simulate-only` compares what a step takes'
        raise ConfigError("trains nothing, and modes of parameter servers differ in what they learn", "run.device", "'emulated'", hint)
    if experiment.workload.target_loss is None:
        hint = "set workload.target_loss; `fleetbench tune --simulate-only` compares what a step takes without one"
        what = "is not set, and nothing else prices what modes of parameter servers cost in loss"
        raise ConfigError(what, "workload.target_loss", hint=hint)
    hosts_of(experiment)


def search_modes(experiment: Experiment, step_s: StepS, progress: Progress | None = None) -> Search:
    """Simulate the experiment's own mode and Fleet's other modes.

    Raises the error of ``step_s`` for its own mode.
    """
    found, optimizer = search_listed(_modes(experiment), name_of, step_s, progress), experiment.workload.optimizer
    if optimizer == "sgd":
        return found
    return dataclasses.replace(
        found, notes=(left_out("GeoSGD", "is not tried", f"it is for SGD, and workload.optimizer is {optimizer}"), *found.notes)
    )


def shortened(experiment: Experiment, least: int | None = None) -> Window:
    """Return the experiment shortened to at least ``least`` steps, by default ``tune.simulated_steps``.

    They are whole rounds of GeoSGD, or all steps.
    """
    rounds = min(_ROUNDS * largest_geo_k(experiment), experiment.workload.steps)
    return with_steps(experiment, least or experiment.tune.simulated_steps, rounds)


def _modes(experiment: Experiment) -> list[DistributedStrategy]:
    """Return the strategies to compare, the experiment's own first.

    A trainer sends its waiting gradients after ``send_wait_times`` pauses without a step. For K and merging to
    have an effect, the pauses together last at least one and a half steps of compute.
    """
    strategy, table = experiment.strategy, table_for(experiment)
    own = strategy.a_sync_configs
    pauses = max(own.send_wait_times, math.ceil(1.5 * (table.forward_ns + table.backward_ns) / WAIT_NS))
    modes: list[dict[str, Any]] = [{"k_steps": 0, "max_merge_var_num": 1}]
    modes += [{"k_steps": 0, "max_merge_var_num": merged, "send_wait_times": pauses} for merged in MERGED]
    geo_steps = [k for k in experiment.tune.local_steps if k > 1 and experiment.workload.optimizer == "sgd"]
    modes += [{"k_steps": k_steps, "send_wait_times": pauses} for k_steps in geo_steps]
    found = [strategy, strategy.without("a_sync")]
    found += [strategy.replace(a_sync=True, a_sync_configs=dataclasses.replace(own, **mode)) for mode in modes]
    return list(dict.fromkeys(found))
