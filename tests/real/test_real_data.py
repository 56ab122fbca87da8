"""Equal data for every trainer, and the digits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import prepare
from fleetbench.workloads.data.reader import Sampler, Unlike


def _sampler(rank: int, *, trainers: int = 3, uneven: str = "cut", num_samples: int = 103) -> Sampler:
    return Sampler(num_samples=num_samples, batch_size=8, trainers=trainers, rank=rank, seed=5, uneven=uneven)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_unlike_trainers_have_classes_of_their_own(share: float, tmp_path: Path) -> None:
    """No sample twice, the joint reader reads the same; of 10 classes each of 4 trainers sees few, or mostly those."""
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    np.save(tmp_path / "y_train.npy", labels)
    unlike = Unlike(4, 8, share, tmp_path / "y_train.npy")
    own = [dataclasses.replace(_sampler(rank, trainers=4, num_samples=2000), unlike=unlike) for rank in range(4)]
    joint = dataclasses.replace(own[0], batch_size=32, trainers=1)
    seen = [np.concatenate([sampler.indices(step) for step in range(62)]) for sampler in own]
    assert len(np.unique(np.concatenate(seen))) == 4 * 8 * 62
    for step in (0, 61):
        assert np.array_equal(joint.indices(step), np.concatenate([sampler.indices(step) for sampler in own]))
    for rank, samples in enumerate(seen):
        piece = (labels[samples] >= 2.5 * rank - 1) & (labels[samples] <= 2.5 * (rank + 1))
        assert piece.mean() > (0.99 if share == 1 else 0.6)
        first, last = labels[samples[:248]].mean(), labels[samples[248:]].mean()
        assert abs(first - last) < 0.8, "a trainer's classes come in no order"
    if share == 0.5:
        assert all(len(set(labels[samples].tolist())) == 10 for samples in seen)


def test_a_teachers_labels_are_noisy_as_told(tmp_path: Path) -> None:
    """A fifth of the labels drawn among ten: 0.18 differ from a linear teacher's; a perceptron's are learnt by no linear model."""
    kinds: list[dict[str, float]] = [{}, {"noise": 0.2}, {"teacher": 32}]
    found = []
    for number, options in enumerate(kinds):
        prepare(Workload(model="mlp", data="synthetic", data_options=options), 3, tmp_path / str(number))
        found.append(np.load(tmp_path / str(number) / "y_train.npy"))
    assert (found[0] != found[1]).mean() == pytest.approx(0.18, abs=0.015)
    inputs = np.load(tmp_path / "0" / "x_train.npy")
    assert np.array_equal(inputs, np.load(tmp_path / "2" / "x_train.npy"))
    for labels, least, most in ((found[0], 0.85, 1.0), (found[2], 0.3, 0.7)):
        weights = np.linalg.lstsq(inputs, np.eye(10)[labels], rcond=None)[0]
        assert least < ((inputs @ weights).argmax(1) == labels).mean() < most
    for bad in ({"noise": 0}, {"teacher": 0.5}):
        with pytest.raises(ConfigError, match=f"data_options.{next(iter(bad))}"):
            prepare(Workload(model="mlp", data="synthetic", data_options=bad), 3, tmp_path / "bad")
    with pytest.raises(ConfigError, match="unlike_data"):
        Workload(unlike_data=1.5)


def test_padding_is_random() -> None:
    """What fills up the last step is not how the epoch begins, differs by epoch and seed, and is drawn again the same."""

    def padding(epoch: int, seed: int = 5) -> list[int]:
        joint = Sampler(num_samples=103, batch_size=24, trainers=1, rank=0, seed=seed, uneven="pad")
        assert joint.epoch(5 * epoch) == joint.epoch(5 * epoch + 4) == epoch
        return [int(sample) for sample in joint.indices(5 * epoch + 4)[-17:]]

    first = [int(sample) for sample in Sampler(103, 24, 1, 0, 5, "pad").indices(0)[:17]]
    drawn = [padding(0), padding(1), padding(0, seed=6), first]
    assert len({tuple(samples) for samples in drawn}) == 4
    assert padding(0) == drawn[0]
    shown = np.bincount(np.concatenate([padding(epoch) for epoch in range(200)]), minlength=103)
    assert shown.min() > 0  # 33 expected, a standard deviation of 5
    assert shown.max() < 66


def test_an_epoch_may_be_shorter_but_not_longer_than_the_data() -> None:
    """``steps_per_epoch`` cuts an epoch short; more steps than the data give are refused with the number they give."""
    short = dataclasses.replace(_sampler(0), wanted_steps=2)
    assert short.steps_per_epoch == 2
    assert not np.array_equal(short.indices(0), short.indices(2))
    with pytest.raises(ConfigError, match=r"steps_per_epoch.*5"):
        _ = dataclasses.replace(_sampler(0), wanted_steps=5).steps_per_epoch


@pytest.mark.parametrize("uneven", ["cut", "pad"])
def test_ranks_laid_end_to_end_are_the_joint_batch(uneven: str) -> None:
    """At every step the batches of all ranks are the one of a single process with the joint batch size."""
    joint = Sampler(num_samples=103, batch_size=24, trainers=1, rank=0, seed=5, uneven=uneven)
    for position in range(11):
        parts = np.concatenate([_sampler(rank, uneven=uneven).indices(position) for rank in range(3)])
        np.testing.assert_array_equal(parts, joint.indices(position))
