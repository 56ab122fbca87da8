"""Word2Vec: its text, vocabulary, thinning, windows and negatives against the paper's formulas, its gradients written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_out_metrics import held_out_metrics, nearest
from scipy.stats import chi2

from fleetbench.workload import Workload
from fleetbench.workloads.data.data import held_out, num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.data.words import Negatives, kept_share, neighbours, subsample
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import make_optimizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models, and perhaps other processes on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def _sampler(folder: Path, *, rank: int = 0, trainers: int = 1, batch_size: int = 100) -> Sampler:
    samples = num_training_samples(folder)
    return Sampler(num_samples=samples, batch_size=batch_size, trainers=trainers, rank=rank, seed=0, uneven="cut")


def test_frequent_words_are_thinned_out_as_published() -> None:
    """A word of frequency f stays with probability min(1, sqrt(t / f)), within five standard deviations, and ends of paragraphs stay."""
    counts = np.array([60_000, 30_000, 9_000, 990, 10])
    text = np.repeat(np.arange(5), counts)
    text = np.concatenate([text, np.full(77, -1)])
    threshold = 0.05
    kept = subsample(text, counts, threshold, _generator())
    assert (kept == -1).sum() == 77
    for word, count in enumerate(counts):
        share = min(1.0, math.sqrt(threshold / (count / 100_000)))
        assert kept_share(counts, threshold)[word] == pytest.approx(share)
        deviation = math.sqrt(count * share * (1 - share))
        assert abs((kept == word).sum() - count * share) <= 5 * deviation


def test_windows_hold_the_written_out_pairs() -> None:
    """Every middle word meets the words at most its own width away, in its paragraph; widths are uniform."""
    text = np.array([3, 1, 4, 1, 5, -1, 9, 2, 6])
    width = np.random.Generator(np.random.Philox(7)).integers(1, 4, 8)
    words, paragraph = [3, 1, 4, 1, 5, 9, 2, 6], [0] * 5 + [1] * 3
    expected = [
        (words[middle], words[other])
        for middle in range(8)
        for other in range(8)
        if middle != other and paragraph[middle] == paragraph[other] and abs(middle - other) <= width[middle]
    ]
    assert sorted(map(tuple, neighbours(text, 3, _generator(7)).tolist())) == sorted(expected)
    assert len(neighbours(np.arange(100_000), 5, _generator())) == pytest.approx(100_000 * 2 * 3, rel=0.01)
    assert neighbours(np.array([1]), 5, _generator()).shape == (0, 2)


def test_negatives_follow_the_unigrams_to_the_power_of_three_quarters() -> None:
    """A chi-squared test of a million draws at level 1e-6."""
    counts = np.array([1000, 500, 100, 50, 10, 5, 1, 0])
    law = counts**0.75 / (counts**0.75).sum()
    negatives = Negatives(counts, 5, 3)
    drawn = np.bincount(negatives.drawn(0, 0, 200_000).reshape(-1), minlength=len(counts))
    expected = law * 1_000_000
    assert drawn[-1] == 0
    assert ((drawn - expected)[:-1] ** 2 / expected[:-1]).sum() < chi2.ppf(1 - 1e-6, len(counts) - 2)


def test_batches_are_pairs_with_fresh_negatives(tmp_path: Path) -> None:
    """Two ranks read what one process with the joint batch reads; another epoch brings the pairs back with other negatives."""
    workload = Workload(model="word2vec", data="synthetic", model_options={"vocab": 40}, data_options={"samples": 500, "negatives": 3})
    prepare(workload, 5, tmp_path)
    joint = open_batches(workload, tmp_path, _sampler(tmp_path, batch_size=100))
    ranks = [open_batches(workload, tmp_path, _sampler(tmp_path, rank=rank, trainers=2, batch_size=50)) for rank in range(2)]
    for position in (0, 3, 4):
        inputs, labels = joint.batch(position)
        assert inputs.shape == (100, 5)
        assert inputs.dtype == torch.int64
        assert not labels.any()
        assert torch.equal(inputs, torch.cat([reader.batch(position)[0] for reader in ranks]))
    seen = [torch.cat([joint.batch(position)[0] for position in range(first, first + 4)]) for first in (0, 4)]
    one, other = (sorted(map(tuple, rows[:, :2].tolist())) for rows in seen)
    assert one == other
    assert sorted(map(tuple, seen[0].tolist())) != sorted(map(tuple, seen[1].tolist()))
    assert held_out(tmp_path)[0].shape == (100, 5)


def test_gradients_are_the_written_out_ones() -> None:
    """Loss and gradients of a batch with words that repeat are those of the paper's objective, computed densely, word by word."""
    model: Any = build_model("word2vec", {"vocab": 7, "dim": 3}, "float64", 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.words.weight.copy_(torch.randn(7, 3, generator=generator))
        model.contexts.weight.copy_(torch.randn(7, 3, generator=generator))
    batch = torch.tensor([[0, 1, 2, 2, 5], [0, 2, 1, 0, 0], [3, 1, 1, 6, 2]])
    loss = loss_of("word2vec")(model(batch), torch.zeros(3, dtype=torch.int64))
    loss.backward()
    middle, context = model.words.weight.detach().numpy(), model.contexts.weight.detach().numpy()
    gradients, total = (np.zeros((7, 3)), np.zeros((7, 3))), 0.0
    for row in batch.tolist():
        for place, candidate in enumerate(row[1:]):
            sign = 1.0 if place == 0 else -1.0
            probability = 1 / (1 + math.exp(-sign * middle[row[0]] @ context[candidate]))
            total -= math.log(probability) / 3
            gradients[0][row[0]] += -sign * (1 - probability) * context[candidate] / 3
            gradients[1][candidate] += -sign * (1 - probability) * middle[row[0]] / 3
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12)
    summed = loss_of("word2vec")(model(batch), torch.zeros(3, dtype=torch.int64), reduction="sum")
    assert float(summed.detach()) == pytest.approx(3 * total, rel=1e-12)
    for parameter, expected in zip((model.words.weight, model.contexts.weight), gradients, strict=True):
        assert parameter.grad.is_sparse
        np.testing.assert_allclose(parameter.grad.to_dense().numpy(), expected, atol=1e-14)
    assert set(model.contexts.weight.grad.coalesce().indices()[0].tolist()) == {0, 1, 2, 5, 6}


@pytest.mark.slow
def test_neighbours_of_trained_words_share_their_topic(tmp_path: Path) -> None:
    """On pairs with planted topics, nine of ten nearest neighbours of frequent words are of the word's topic (by chance one in eight)."""
    options = {"vocab": 400, "dim": 16}
    workload = Workload(model="word2vec", data="synthetic", model_options=options, batch_size=100, lr=1.0)  # type: ignore[arg-type]  # an invariant dict
    prepare(workload, 0, tmp_path)
    model: Any = build_model("word2vec", options, "float32", 0)
    before = held_out_metrics(model, "word2vec", tmp_path).loss
    _train(model, workload, tmp_path, 1500)
    after = held_out_metrics(model, "word2vec", tmp_path)
    assert after.loss < 0.8 * before
    assert after.auc is None
    same = [neighbour % 8 == word % 8 for word in range(64) for neighbour in nearest(model.words.weight, word, 5)]
    assert np.mean(same) > 0.9


def _train(model: Any, workload: Workload, folder: Path, steps: int) -> None:
    reader, optimizer, compare = open_batches(workload, folder, _sampler(folder)), make_optimizer(model, workload), loss_of(workload.model)
    for position in range(steps):
        inputs, labels = reader.batch(position)
        compare(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
