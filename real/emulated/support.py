"""What an emulated device executes of an experiment; everything else is refused by name."""

from __future__ import annotations

import dataclasses

from fleetbench.declared import UNFOLLOWED, refuse_undeclared
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import COMPUTE_ONLY, EMULATED
from fleetbench.result import skip
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import changed_fields
from fleetbench.workload import LAYERS

WHO = "an emulated device"


def is_emulated(experiment: Experiment) -> bool:
    """Whether the experiment's trainers sleep instead of computing."""
    return experiment.run.device == EMULATED


def refuse_unemulated(experiment: Experiment, strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` for the first thing that takes real data, real losses or real numbers."""
    workload = experiment.workload
    if workload.target_loss is not None and workload.loss_curve is None and workload.loss_recording is None:
        raise ConfigError(
            f"{WHO} trains nothing that could reach it",
            "workload.target_loss",
            repr(workload.target_loss),
            'drop it, or declare workload.loss_curve = { start = 2.3, floor = 0.2, half_life = "150 steps" }',
        )
    refuse_undeclared(experiment, strategy, WHO)
    if strategy.scales_loss:
        raise ConfigError(
            f"scales losses, and {WHO} has none whose gradients could overflow",
            "strategy.amp",
            "true",
            'set amp_configs.dtype = "bf16", which scales nothing, or drop amp; fp16_allreduce and bf16_allreduce are executed',
        )


def with_compute(experiment: Experiment) -> Experiment:
    """The experiment on a device that computes, for measuring what an emulated one sleeps by: this machine's processors."""
    if not is_emulated(experiment):
        return experiment
    return experiment.replace(
        run=dataclasses.replace(experiment.run, device="cpu", launcher="local"),
        workload=dataclasses.replace(experiment.workload, target_loss=None, loss_curve=None, loss_recording=None),
    )


def executed_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """The strategy without what changes compute alone: that is in the layer table, and there is no compute to change."""
    plain, build = DistributedStrategy(), "build_strategy."
    fused = {name.removeprefix(build): getattr(plain.build_strategy, name.removeprefix(build)) for name in COMPUTE_ONLY if build in name}
    return dataclasses.replace(
        strategy,
        amp_configs=plain.amp_configs,
        recompute_configs=plain.recompute_configs,
        build_strategy=dataclasses.replace(strategy.build_strategy, **fused),
        **{name: getattr(plain, name) for name in COMPUTE_ONLY if "." not in name},
    )


def not_emulated(experiment: Experiment, strategy: DistributedStrategy) -> list[dict[str, str]]:
    """Lines that a run leaves out without being wrong about time."""
    found = []
    workload = experiment.workload
    if workload.target_loss is not None and strategy.mode == "ps":
        found.append(skip("workload.target_loss", UNFOLLOWED))
    elif workload.target_loss is not None and workload.loss_curve is None:
        found.append(skip("workload.target_loss", "a recording holds training losses only: final_loss and time_to_target_s are null"))
    if workload.model == LAYERS:
        executed = dict(changed_fields(executed_part(strategy), "strategy"))
        if workload.host is not None and workload.host.fetch:
            executed["strategy.fetch_every_n_steps"] = strategy.fetch_every_n_steps
        if workload.host is not None and (workload.host.per_collective or workload.host.pack):
            found.append(skip("workload.host", "starting collectives and packing take what they take on this machine"))
        changed = [name for name, value in changed_fields(strategy, "strategy") if executed.get(name) != value]
        found += [skip(name, "declared layer times do not depend on it") for name in changed]
    return found
