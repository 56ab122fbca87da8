"""Models with sparse gradients on the registry's own path: synchronous trainers against one process with the joint batch."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.experiment import Experiment
from real.job.session import measure

WORD2VEC = {"model": "word2vec", "model_options": {"vocab": 60, "dim": 8}, "data_options": {"samples": 2000}, "lr": 1.0}
WIDE_DEEP = {
    "model": "wide_deep",
    "model_options": {"rows": 5000, "dim": 4, "hidden": 16},
    "data_options": {"samples": 2000, "categories": 5},
    "lr": 0.1,
}


@pytest.mark.parametrize("model", [WORD2VEC, pytest.param(WIDE_DEEP, marks=pytest.mark.slow)], ids=["word2vec", "wide_deep"])
@pytest.mark.slow
def test_two_trainers_are_one_with_the_joint_batch(model: dict[str, Any]) -> None:
    """The same pairs, the same negatives, the mean of the same gradients: the held-out loss agrees to rounding, and has fallen."""
    losses = []
    for trainers, batch_size, steps in ((2, 8, 60), (1, 16, 60), (1, 16, 1)):
        workload = {"data": "synthetic", "batch_size": batch_size, "steps": steps, **model}
        experiment = Experiment.from_dict(
            {"name": "sparse", "workload": workload, "cluster": {"trainers_per_node": trainers}, "run": {"warmup_steps": 0}}
        )
        losses.append(measure(experiment).summary.final_loss)
    two, one, begun = losses
    assert two is not None
    assert begun is not None
    assert two == pytest.approx(one, rel=1e-6)
    assert two < 0.99 * begun
