"""Trackers: report the findings to TensorBoard, Weights & Biases and MLflow if a script has an open run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def log_to_open_runs(numbers: Mapping[str, float]) -> list[str]:
    """Log numbers by name into each run that is open in this process; return the trackers that took them.

    A tracker that raises an error is left out, because it must not affect the script. No tracker is imported.
    """
    told = []
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    with suppress(Exception):  # whatever a tracker raises
        if wandb is not None and wandb.run is not None:
            wandb.run.summary.update(dict(numbers))
            told.append("wandb")
    with suppress(Exception):  # as above
        if mlflow is not None and mlflow.active_run() is not None:
            mlflow.log_metrics(dict(numbers))
            told.append("mlflow")
    for writer in _writers():
        with suppress(Exception):  # as above
            for name, value in numbers.items():
                writer.add_scalar(name, value)
            told.append("tensorboard")
    return told


def _writers() -> list[Any]:
    """Return open writers of TensorBoard, which keeps no list of them."""
    module = sys.modules.get("torch.utils.tensorboard.writer")
    return [] if module is None else [one for one in gc.get_objects() if type(one) is module.SummaryWriter and one.file_writer is not None]
