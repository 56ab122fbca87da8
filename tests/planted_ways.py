"""Planted ways of training: their steps to the target by formula, and their seconds of a step by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuner_fakes import profiled_experiment

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy, GradientMergeConfigs, LocalSGDConfigs
from tuner.search import Search, search
from tuner.space import search_space
from tuner.ways import OUTER

LOCAL = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=4))
DILOCO = LOCAL.replace(localsgd_configs=replace(LOCAL.localsgd_configs, **OUTER))
MANY = LOCAL.replace(localsgd_configs=LocalSGDConfigs(k_steps=16))
MERGED = DistributedStrategy(gradient_merge=True, gradient_merge_configs=GradientMergeConfigs(k_steps=2))
UPDATES = {(1, False, 1): 100.0, (4, False, 1): 110.0, (16, False, 1): 300.0, (4, True, 1): 90.0, (16, True, 1): None, (1, False, 2): 150.0}
"""Planted steps to the target by K, outer optimizer and merged gradients."""


def step_s(strategy: DistributedStrategy) -> float:
    """10 ms of compute, and an exchange of 10 ms, which local steps and merged gradients share; buckets of 1 MB take 1 ms off it."""
    every = strategy.local_steps * strategy.gradient_merge_configs.k_steps
    return 0.010 + (0.009 if strategy.fuse_grad_size_in_MB == 1.0 else 0.010) / every


def planted(experiment: Experiment, _limit_s: float, _at_least: int = 0) -> float | None:
    """Steps to the target; at a higher rate as many times fewer."""
    strategy = experiment.strategy
    steps = UPDATES[strategy.local_steps, strategy.localsgd_configs.has_outer, strategy.gradient_merge_configs.k_steps]
    return None if steps is None else steps / max(1.0, strategy.lr_scale)


def searched(tmp_path: Path, **tune: object) -> tuple[Experiment, Search]:
    """An experiment with few choices, and its search."""
    tmp_path.mkdir(exist_ok=True)
    wanted = {"local_steps": (1, 4, 16), "gradient_merge": (1, 2), "fuse_grad_size_in_MB": (1.0, 32.0), "wire": ("fp32",)}
    wanted |= {"thread_num": (1,), "nccl_comm_num": (1,), "lr_scale": (1.0,)} | tune
    experiment = profiled_experiment(tmp_path, **wanted)
    return experiment, search(experiment, search_space(experiment), DistributedStrategy(), out=tmp_path, step_s=step_s)
