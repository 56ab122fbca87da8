"""Asked: what an experiment may ask of a user's script, which has a model, data, trainers and a strategy of its own."""

from __future__ import annotations

from collections.abc import Sequence

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy

_OF_THE_WORKLOAD = ("target_loss", "eval_every", "steps")


def refuse_what_is_the_scripts(base: Experiment, overrides: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` for what nobody can do to a script, and for ``--set`` of what it decides itself."""
    if base.cluster.stragglers:
        what = "nobody injects stragglers into a user's script: it has those of its machines"
        raise ConfigError(
            what, "cluster.stragglers", f"{len(base.cluster.stragglers)} entries", "drop them; profile measures what there is"
        )
    if base.strategy != DistributedStrategy():
        hint = "let the script load it: fleet.init(DistributedStrategy.load(FILE)); what it uses now is what others are compared with"
        raise ConfigError("the script hands its own strategy to fleet.init", "strategy", repr(base.strategy.changes()), hint)
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.strip().partition(".")
        if section == "workload" and name.split(".")[0] not in _OF_THE_WORKLOAD:
            allowed = ", ".join(f"workload.{field}" for field in _OF_THE_WORKLOAD)
            raise ConfigError("is the script's own", key.strip(), value.strip(), f"change the script; what can be set of it is {allowed}")
