"""Trainings that virtual trainers and real ones share: every strategy whose order is fixed, on three models."""

from __future__ import annotations

from typing import Any

from fleetbench.experiment import Experiment

STEPS = 32
_DIGITS = {"model": "digits_mlp", "model_options": {"hidden": 16}, "batch_size": 8, "lr": 0.02, "optimizer": "momentum"}
_CLICKS: dict[str, Any] = {
    "model": "wide_deep",
    "model_options": {"rows": 200, "dim": 2, "hidden": 8, "depth": 1},
    "data": "synthetic",
    "data_options": {"samples": 2000},
    "batch_size": 16,
}
_IMAGES: dict[str, Any] = {
    "model": "resnet50",
    "model_options": {"width": 2, "classes": 3},
    "data": "synthetic",
    "data_options": {"samples": 60, "image_size": 33},
    "batch_size": 4,
    "lr": 0.05,
}
_PAIRS: dict[str, Any] = {
    "model": "word2vec",
    "model_options": {"vocab": 40, "dim": 4},
    "data": "synthetic",
    "data_options": {"samples": 1000, "held_out": 200},
    "batch_size": 16,
    "lr": 1.0,
}
_ADAM, _FLOAT32 = {"optimizer": "adam", "lr": 0.01}, {"dtype": "float32"}
_DECAY = {"lr_decay": [{"step": 12, "factor": 0.5}, {"step": 22, "factor": 0.2}]}
_EPOCHS = {"steps_per_epoch": 11}


def _local(**configs: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": configs}


def _adaptive(**configs: Any) -> dict[str, Any]:
    return {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, **configs}}


def _merge(**configs: Any) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3, **configs}}


_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "synchronous": (_DIGITS, {}),
    "adagrad and decay": ({**_DIGITS, "optimizer": "adagrad", "lr": 0.02, "weight_decay": 1e-3, **_DECAY}, {"fuse_all_reduce_ops": False}),
    "adam": ({**_DIGITS, **_ADAM}, {"build_strategy": {"enable_backward_optimizer_op_deps": False}}),
    "local, fleet": (_DIGITS, _local(k_steps=4, begin_step=6)),
    "local, document": ({**_DIGITS, **_EPOCHS}, _local(k_steps=6, schedule="document", warmup_epochs=1)),
    "local, torch": (_DIGITS, _local(k_steps=4, begin_step=6, schedule="torch")),
    "local, momentum averaged": (_DIGITS, _local(k_steps=5, momentum="average")),
    "local, momentum reset": (_DIGITS, _local(k_steps=5, momentum="reset")),
    "local, adam reset": ({**_DIGITS, **_ADAM}, _local(k_steps=4, momentum="reset")),
    "local, adam's momentum averaged": ({**_DIGITS, **_ADAM}, _local(k_steps=4, momentum="average")),
    "local, adam averaged": ({**_DIGITS, **_ADAM}, _local(k_steps=4, optimizer_state="average")),
    "adaptive, fleet": ({**_DIGITS, **_DECAY}, _adaptive()),
    "adaptive, paper": (_DIGITS, _adaptive(variant="paper")),
    "adaptive, document": ({**_DIGITS, **_EPOCHS}, _adaptive(variant="document")),
    "adaptive, qsr": ({**_DIGITS, **_DECAY}, _adaptive(variant="qsr", alpha=0.25)),
    "scaled rate": ({**_DIGITS, **_DECAY}, {"lr_scale": 1.5}),
    "scaled rate, qsr": ({**_DIGITS, **_DECAY}, {"lr_scale": 2.0} | _adaptive(variant="qsr", alpha=0.25)),
    "scaled rate, adam merged": ({**_DIGITS, **_ADAM}, {"lr_scale": 0.5} | _merge() | _local(k_steps=2)),
    "outer": (_DIGITS, _local(k_steps=4, outer_lr=0.7, outer_momentum=0.9)),
    "outer, adam": ({**_DIGITS, **_ADAM}, _local(k_steps=4, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=False)),
    "outer, adaptive": ({**_DIGITS, **_DECAY}, _adaptive(variant="paper", outer_lr=0.5)),
    "fragments": (_DIGITS, _local(k_steps=6, fragments=2, begin_step=4, outer_lr=0.7, outer_momentum=0.9)),
    "fragments beside steps": (_DIGITS, _local(k_steps=6, fragments=2, overlap_steps=2, mixing=0.25, outer_momentum=0.5)),
    "fragments, averaged": (_DIGITS, _local(k_steps=3, overlap_steps=1, mixing=0.5)),
    "merge, carry": ({**_DIGITS, **_EPOCHS}, _merge()),
    "merge, flush": ({**_DIGITS, **_EPOCHS}, _merge(remainder="flush")),
    "merge, drop": ({**_DIGITS, **_EPOCHS}, _merge(remainder="drop", avg=False)),
    "merge, lr by update": ({**_DIGITS, **_DECAY}, _merge(lr_per="update") | _local(k_steps=2)),
    "merge and adaptive": ({**_DIGITS, **_DECAY}, _merge(lr_per="update") | _adaptive()),
    "fp16 wire": ({**_DIGITS, **_FLOAT32}, {"fp16_allreduce": True}),
    "bf16 wire": ({**_DIGITS, **_FLOAT32}, {"bf16_allreduce": True}),
    "amp fp16": ({**_DIGITS, **_FLOAT32}, {"amp": True, "amp_configs": {"incr_every_n_steps": 8, "init_loss_scaling": 2.0**22}}),
    "amp fp16, local": ({**_DIGITS, **_FLOAT32}, {"amp": True, "amp_configs": {"init_loss_scaling": 2.0**22}} | _local(k_steps=4)),
    "amp bf16": ({**_DIGITS, **_FLOAT32}, {"amp": True, "amp_configs": {"dtype": "bf16"}}),
    "float32": ({**_DIGITS, **_FLOAT32}, {}),
    "sparse": (_CLICKS, {}),
    "sparse, merge": ({**_CLICKS, "optimizer": "adagrad"}, _merge()),
    "sparse, local": ({**_CLICKS, "optimizer": "momentum"}, _local(k_steps=4)),
    "pairs": (_PAIRS, {}),
    "pairs, local": (_PAIRS, _local(k_steps=4)),
    "batch norm": ({**_IMAGES, "steps": 8}, {}),
    "batch norm, averaged": ({**_IMAGES, "steps": 8}, _local(k_steps=3, buffers="average")),
    "batch norm, by update": ({**_IMAGES, "steps": 8}, _merge(batch_norm_per="update")),
}
_OF_FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hierarchy": (_DIGITS, {"use_hierarchical_allreduce": True}),
    "hierarchy, scattered": (_DIGITS, {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}),
    "hierarchy, fp16": ({**_DIGITS, **_FLOAT32}, {"use_hierarchical_allreduce": True, "fp16_allreduce": True}),
    "outer, BF16": ({**_DIGITS, **_FLOAT32}, {"bf16_allreduce": True} | _local(k_steps=4, outer_lr=0.7, outer_momentum=0.9)),
    "hierarchy, local": (_DIGITS, {"use_hierarchical_allreduce": True} | _local(k_steps=4)),
    "workers": (_DIGITS, _local(k_steps=4, worker_trainers=2)),
    "workers beside steps": (_DIGITS, _local(k_steps=6, fragments=2, overlap_steps=2, outer_momentum=0.5, worker_trainers=2)),
    "workers, momentum averaged, merge": ({**_DIGITS, **_EPOCHS}, _merge() | _local(k_steps=2, momentum="average", worker_trainers=2)),
    "workers, BF16": ({**_DIGITS, **_FLOAT32}, {"bf16_allreduce": True} | _local(k_steps=4, outer_momentum=0.5, worker_trainers=2)),
}
ROUNDED = ("fp16 wire", "bf16 wire", "hierarchy, fp16", "outer, BF16", "workers, BF16", "amp fp16", "amp fp16, local", "amp bf16")
"""Cases in which numbers are rounded to 16 bits, so that another order of sums moves one of them now and then."""


def cases(trainers: int, steps: int = STEPS) -> dict[str, Experiment]:
    """Experiments by name, for two trainers on a node, or for four on two."""
    found = {}
    for name, (workload, strategy) in ({**_CASES, **_OF_FOUR} if trainers == 4 else _CASES).items():
        data = {
            "workload": {"dtype": "float64", "steps": steps, "eval_every": 5, "target_loss": 0.1, **workload},
            "cluster": {"nodes": trainers // 2, "trainers_per_node": 2, "inter": {"bandwidth": "1 Gbit/s", "latency": "1 us"}},
            "strategy": strategy,
            "run": {"warmup_steps": 3, "seed": 5},
        }
        found[name] = Experiment.from_dict(data)
    return found
