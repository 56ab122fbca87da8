"""What the real executor executes; everything else is refused by name."""

from __future__ import annotations

from fleetbench.declared import LOSSES
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.servers.rules import refuse_unserved
from fleetbench.plan.training import PLANNED
from fleetbench.profile import EMULATED
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import RUN, WORKLOAD, refuse_unexecuted
from fleetbench.workload import LAYERS
from real.emulated.support import is_emulated, refuse_unemulated

_EXECUTOR = "the real executor"
UNREALISED = ("intra", "inter", "racks", "nics_per_node", "cores_per_node", "collective", "host_bandwidth", "gpu")
"""Lines of a cluster that one machine cannot realise; a run lists them in ``skipped``."""
_SERVERS = frozenset({"cluster.servers", "cluster.server_placement"})
_CLUSTER = frozenset(f"cluster.{name}" for name in ("nodes", "trainers_per_node", "stragglers", *UNREALISED))


def refuse_unsupported(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for the first thing that the experiment asks for and real runs cannot do."""
    if experiment.run.launcher == "command":
        hint = "fleetbench sim simulates its profile, fleetbench tune -- COMMAND measures it"
        raise ConfigError("is a user's script, which only its own command trains", "workload.model", repr(experiment.workload.model), hint)
    served = strategy.mode == "ps"
    if served:
        refuse_unserved(strategy)
    else:
        refuse_unexecuted(strategy, "strategy", PLANNED, _EXECUTOR)
    refuse_unexecuted(experiment.run, "run", RUN, _EXECUTOR)
    on_testbed = experiment.run.launcher == "testbed"
    cluster = _CLUSTER | ({"cluster.node_overrides"} if on_testbed else set()) | (_SERVERS if served else set())
    refuse_unexecuted(experiment.cluster, "cluster", cluster, _EXECUTOR)
    emulated = is_emulated(experiment)
    if served and experiment.run.device not in ("cpu", EMULATED):
        what, hint = "trains with parameter servers on CPUs alone", 'set run.device = "cpu", or "emulated"'
        raise ConfigError(f"{_EXECUTOR} {what}", "run.device", repr(experiment.run.device), hint)
    if experiment.workload.model == LAYERS and not emulated:
        raise ConfigError(
            "a table of layers computes nothing",
            "workload.model",
            "'layers'",
            'set run.device = "emulated", simulate it, or choose a registry model',
        )
    refuse_unexecuted(experiment.workload, "workload", WORKLOAD | LOSSES if emulated else WORKLOAD, _EXECUTOR)
    if emulated:
        refuse_unemulated(experiment, strategy)
    if experiment.run.launcher == "slurm":
        raise ConfigError(f"{_EXECUTOR} does not execute this yet", "run.launcher", "'slurm'", "one of local, testbed, torchrun")
