"""TensorBoard: a run's steps as scalars, on request."""

from pathlib import Path

from fleetbench.errors import ConfigError
from fleetbench.result import PARTS, RunResult


def save_scalars(run: RunResult, folder: str | Path) -> None:
    """Write the means over ranks of every step, in seconds, and the loss where there is one, as event files for TensorBoard.

    Raises ``ConfigError`` where ``tensorboard`` is not installed, which fleetbench does not need.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("needs another package", "save_scalars", "tensorboard", "pip install tensorboard") from None
    means = run.steps.groupby("step")[[*PARTS, *(["loss"] if "loss" in run.steps else [])]].mean()
    means.insert(0, "step_s", means[list(PARTS)].sum(axis=1))
    with SummaryWriter(str(folder)) as writer:
        for name, values in means.items():
            known = values.dropna()
            for step, value in zip(known.index.to_numpy(), known.to_numpy(), strict=True):
                writer.add_scalar(str(name), float(value), int(step))
