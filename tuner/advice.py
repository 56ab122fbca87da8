"""Fleet's advice as an arm: the documents' rules, without what this experiment cannot measure.

A rule that changes compute needs a layer table of its own in the profile. Local SGD needs a
target that prices what it costs in loss, and a first decay within the steps that are measured.
"""

from __future__ import annotations

from fleetbench.advice import LOCAL_SGD, MIXED_PRECISION, OP_FUSION, Advice
from fleetbench.advice import advice as documents_advice
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import LayerTable
from fleetbench.profile import Profile, table_for
from fleetbench.strategy import DistributedStrategy

_LOCAL_SGD_FIELDS = ("localsgd", "localsgd_configs")
_COMPUTE = (("thread_num", ("thread_num",)), (OP_FUSION, ("build_strategy",)), (MIXED_PRECISION, ("amp", "amp_configs")))
"""Rules that change compute: their names, and the fields that they set."""


def advice(experiment: Experiment, table: LayerTable, profile: Profile | None = None) -> Advice:
    """Fleet's advice on top of the experiment's strategy, and what was left out of it with the reason.

    ``table`` is the layer table of the experiment's own strategy; a profile that is not given is
    read from the file the workload names.
    """
    size = sum(gradient.nbytes for gradient in table.by_readiness() if not gradient.sparse)
    base, device = experiment.strategy, experiment.run.device
    advised, listed = documents_advice(experiment.workload, experiment.cluster, size, device=device, base=base)
    left_out = list(listed)
    if (reason := _unmeasured(experiment)) is not None and _differ(advised, base, _LOCAL_SGD_FIELDS):
        advised = _with_fields(advised, base, _LOCAL_SGD_FIELDS)
        left_out.append(f"{LOCAL_SGD}: {reason}")
    strategy = advised
    for _, names in _COMPUTE:
        strategy = _with_fields(strategy, base, names)
    for what, names in _COMPUTE:
        candidate = _with_fields(strategy, advised, names)
        if candidate == strategy:
            continue
        try:
            table_for(experiment.replace(strategy=candidate), profile)
        except ConfigError as error:
            name = f"thread_num = {advised.thread_num}" if what == "thread_num" else what
            left_out.append(f"{name}: the profile {error.what}")
        else:
            strategy = candidate
    return Advice(strategy, tuple(left_out))


def _unmeasured(experiment: Experiment) -> str | None:
    """Why no leg would show what Local SGD costs and gains."""
    workload = experiment.workload
    measured = min(experiment.tune.leg_steps, experiment.tune.simulated_steps)
    if workload.target_loss is None:
        return "no workload.target_loss prices it"
    first = min((decay.step for decay in workload.lr_decay), default=0)
    return f"step {first} lies behind the {measured} steps that are measured" if first >= measured else None


def _differ(one: DistributedStrategy, other: DistributedStrategy, names: tuple[str, ...]) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in names)


def _with_fields(strategy: DistributedStrategy, source: DistributedStrategy, names: tuple[str, ...]) -> DistributedStrategy:
    return strategy.replace(**{name: getattr(source, name) for name in names})
