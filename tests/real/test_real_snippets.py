"""Fleet's documents, each by a script of its own in Fleet's spelling, launched from the command line.

What must come out is found by other means: written-out loops in one process, lists that Fleet's
documents print, and the collectives that torch was asked for.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Arrays
from snippets import toy
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_launches")

FOLDER = Path(__file__).with_name("snippets")
NUM_PARAMETERS = toy.flat(toy.model()).numel()


def _launch(tmp_path: Path, script: str, nproc: int, *arguments: int) -> list[Arrays]:
    """Run ``fleetbench launch``; what every rank saved."""
    command = ["launch", "--nproc", str(nproc), "--log-dir", str(tmp_path / "log"), str(FOLDER / script), str(tmp_path / "out")]
    assert main([*command, *(str(argument) for argument in arguments)]) == 0
    return [dict(np.load(tmp_path / f"out.{rank}.npz")) for rank in range(nproc)]


def _steps_of_epoch(epoch: int, local_sgd_steps: int, local_sgd_warmup: int) -> int:
    """The document's warm-up function: 1 in the warm-up, then the powers of two up to K, then K."""
    if epoch < local_sgd_warmup:
        return 1
    powers = list(itertools.takewhile(lambda power: power <= local_sgd_steps, (2**exponent for exponent in itertools.count())))
    return [*powers, *itertools.repeat(local_sgd_steps, epoch)][epoch - local_sgd_warmup]


class _Replicas:
    """Trainers that update alone, in one process."""

    def __init__(self, ranks: int) -> None:
        self.networks = [toy.model() for _ in range(ranks)]
        self.optimizers = [toy.optimizer(network) for network in self.networks]

    def step(self, number: int) -> float:
        """One step of every trainer; the mean of their losses."""
        losses = []
        for rank, (network, optimizer) in enumerate(zip(self.networks, self.optimizers, strict=True)):
            inputs, labels = toy.batch(number, rank, len(self.networks))
            loss = cross_entropy(network(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    @torch.no_grad()
    def average(self) -> None:
        """Give all trainers the mean of their parameters."""
        for tensors in zip(*(network.parameters() for network in self.networks), strict=True):
            mean = torch.stack([tensor.detach() for tensor in tensors]).mean(dim=0)
            for tensor in tensors:
                tensor.copy_(mean)


def _joint(ranks: int, steps: int, merge: int = 1, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """``(steps, parameters)`` of one process that sees all ranks' samples."""
    network = toy.model(dtype)
    optimizer = toy.optimizer(network)
    history = []
    for step in range(steps):
        inputs, labels = toy.joint_batch(step, ranks, dtype)
        (cross_entropy(network(inputs), labels) / merge).backward()
        if (step + 1) % merge == 0:
            optimizer.step()
            optimizer.zero_grad()
        history.append(toy.flat(network).numpy().copy())
    return np.array(history)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("k", "steps_per_epoch", "published"),
    [(16, 16, [1, 1, 1, 1, 2, 4, 8, 16, 16]), (6, 12, [1, 1, 1, 1, 2, 4, 6, 6])],
)
def test_the_warm_up_function_of_local_sgd(tmp_path: Path, k: int, steps_per_epoch: int, published: list[int]) -> None:
    """K of every epoch is the document's, by the averagings that were really made and by the parameters after every step."""
    assert [_steps_of_epoch(epoch, k, 3) for epoch in range(len(published))] == published
    saved = _launch(tmp_path, "local_sgd_warmup.py", 2, k, len(published), steps_per_epoch)
    replicas = _Replicas(2)
    for step in range(len(published) * steps_per_epoch):
        replicas.step(step)
        if step % published[step // steps_per_epoch] == 0:
            replicas.average()
        for rank, network in enumerate(replicas.networks):
            np.testing.assert_allclose(saved[rank]["history"][step], toy.flat(network).numpy(), rtol=0, atol=1e-12)
    for rank in saved:
        assert rank["averagings"].tolist() == [steps_per_epoch // steps for steps in published]


@pytest.mark.slow
def test_the_adaptive_function_of_local_sgd(tmp_path: Path) -> None:
    """K follows the averaged loss and the falling learning rate once an epoch, at its first averaging: as the written-out function."""
    epochs, steps_per_epoch, first_k = 5, 12, 2
    saved = _launch(tmp_path, "local_sgd_adaptive.py", 2, epochs, steps_per_epoch)
    replicas = _Replicas(2)
    k, since, lr, lr0, loss0, asks = first_k, 0, toy.LR, toy.LR, 0.0, True
    chosen = []
    for step in range(epochs * steps_per_epoch):
        loss = replicas.step(step)
        since += 1
        meets = step == 0 or since == k
        asked = meets and asks
        if meets:
            replicas.average()
            since = 0
        if asked and step == 0:
            loss0 = loss
        elif asked:
            ratio = lr0 * (loss - 0.6) / (lr * max(loss0 - 0.6, 1e-12))
            wanted = max(1, int(first_k * math.sqrt(ratio)))
            k = k if wanted > k + 20 else wanted
            chosen.append(k)
        asks = asks and not asked
        for rank, network in enumerate(replicas.networks):
            np.testing.assert_allclose(saved[rank]["history"][step], toy.flat(network).numpy(), rtol=0, atol=1e-12)
            assert saved[rank]["sizes"][step].tolist() == [int(meets), int(meets)]
        if (step + 1) % steps_per_epoch == 0:
            asks = True
            lr *= 0.4
            for optimizer in replicas.optimizers:
                optimizer.param_groups[0]["lr"] = lr
    assert len(set(chosen)) >= 3
    assert len(chosen) == epochs - 1


def test_gradient_merge_with_four_batches(tmp_path: Path) -> None:
    """Only every fourth batch is followed by an all-reduce and an update: that of one process with four joint batches."""
    steps = 18
    saved = _launch(tmp_path, "gradient_merge.py", 2, steps)
    for rank in saved:
        np.testing.assert_allclose(rank["history"], _joint(2, steps, merge=4), rtol=0, atol=1e-12)
        assert rank["counts"].tolist() == [int((step + 1) % 4 == 0) for step in range(steps)]


@pytest.mark.slow
def test_hierarchical_all_reduce_with_eight_inner_ranks(tmp_path: Path) -> None:
    """Sixteen trainers in two nodes of eight: each reduces in its node, the two leaders all-reduce, and each node broadcasts."""
    steps = 3
    saved = _launch(tmp_path, "hierarchical.py", 16, steps)
    expected = _joint(16, steps)[-1]
    for number, rank in enumerate(saved):
        np.testing.assert_allclose(rank["parameters"], expected, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(rank["parameters"], saved[0]["parameters"])
        leads = number % 8 == 0
        assert rank["names"].tolist() == (["reduce", "all_reduce", "broadcast"] if leads else ["reduce", "broadcast"])
        assert rank["meeting"].tolist() == ([8, 2, 8] if leads else [8, 8])
        assert set(rank["elements"].tolist()) == {NUM_PARAMETERS}


def test_mixed_precision_with_an_initial_scaling_of_128(tmp_path: Path) -> None:
    """The backward carries 128 times the gradient that ``.grad`` holds after it, and training stays FP32's within FP16's resolution."""
    steps = 8
    saved = _launch(tmp_path, "mixed_precision.py", 2, steps)
    scaled = np.mean([rank["scaled"] for rank in saved], axis=0)
    exact = _joint(2, steps, dtype=torch.float32)
    moved = np.abs(exact[-1] - toy.flat(toy.model(torch.float32)).numpy()).max()
    for rank in saved:
        assert set(rank["types"].tolist()) == {"torch.float16"}
        np.testing.assert_allclose(scaled / 128, rank["gradients"], rtol=1e-6, atol=1e-9)
        np.testing.assert_array_equal(rank["history"], saved[0]["history"])
        assert 0 < np.abs(rank["history"] - exact).max() < 0.01 * moved


def test_the_imperative_snippet_is_another_algorithm() -> None:
    """Firing where ``batch % k == 0`` updates after batches 0, 4, 8, ... with the sum: the first from one batch, each later one from four.

    Gradient merge updates after the k-th. From the second update's batches on, the snippet is a
    merge of four with ``avg`` off, which starts one batch late.
    """
    steps, k = 17, 4
    imperative = _imperative(steps, k, first=0)
    moved = [step for step in range(1, steps) if not np.array_equal(imperative[step], imperative[step - 1])]
    assert moved == [4, 8, 12, 16]
    start = toy.flat(toy.model()).numpy()
    assert not np.array_equal(imperative[0], start)
    np.testing.assert_allclose(imperative[0], _joint(2, 1)[0], rtol=0, atol=1e-12)
    for average in (1, k):
        merged = _imperative(steps, k, first=1, divisor=average)
        assert [step for step in range(1, steps) if not np.array_equal(merged[step], merged[step - 1])] == [3, 7, 11, 15]
        assert np.abs(merged[15] - imperative[15]).max() > 1e-3
    np.testing.assert_allclose(_imperative(steps, k, first=1, divisor=k), _joint(2, steps, merge=k), rtol=0, atol=1e-12)


def _imperative(steps: int, k: int, *, first: int, divisor: int = 1) -> np.ndarray:
    """The snippet's loop, batches counted from ``first``; its gradients add up, over ``divisor``."""
    network: nn.Module = toy.model()
    optimizer = toy.optimizer(network)
    history = []
    for step in range(steps):
        inputs, labels = toy.joint_batch(step, 2)
        (cross_entropy(network(inputs), labels) / divisor).backward()
        if (step + first) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
        history.append(toy.flat(network).numpy().copy())
    return np.array(history)
