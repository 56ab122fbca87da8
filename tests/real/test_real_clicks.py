"""Clicks: the hash, planted probabilities, and Wide & Deep against its written-out equations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_out_metrics import held_out_metrics, planted_auc
from sklearn.metrics import roc_auc_score

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import hashed, num_training_samples, open_batches, planted_clicks, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models.registry import build_model, loss_of
from fleetbench.workloads.training import make_optimizer, refuse_dense_optimizer

ROWS = 1_000_001


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models, and perhaps other processes on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _mixed(word: int) -> int:
    """SplitMix64, written out over Python's integers."""
    z = (word + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_hash_is_splitmix64() -> None:
    """Known first outputs of SplitMix64 from seed 0, and rows by column and value as written out over Python's integers."""
    assert [_mixed(0), _mixed(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    values = [0, 1, 0x68FD1E64, 2**32 - 1, 2**32]
    for column in (0, 1, 25):
        expected = [_mixed(column * 2**33 + value) % ROWS for value in values]
        assert hashed(column, values, ROWS).tolist() == expected
    assert len(set(hashed(np.arange(26), 7, ROWS).tolist())) == 26


def test_rows_are_used_evenly() -> None:
    """A chi-squared statistic of a million hashes over 1,000 rows is within six standard deviations of its mean."""
    counts = np.bincount(hashed(np.arange(10)[:, None], np.arange(100_000), 1000).reshape(-1), minlength=1000)
    statistic = ((counts - 1000) ** 2 / 1000).sum()
    assert abs(statistic - 999) < 6 * math.sqrt(2 * 999)


def test_planted_clicks_are_drawn_with_their_probabilities() -> None:
    """Labels follow the probabilities, in every tenth of them; the same seed gives the same, another others."""
    clicks = planted_clicks(0, 100_000, 20, ROWS)
    assert clicks.planted is not None
    for tenth in np.array_split(np.argsort(clicks.planted), 10):
        chance = clicks.planted[tenth]
        deviation = math.sqrt((chance * (1 - chance)).sum())
        assert abs(clicks.labels[tenth].sum() - chance.sum()) < 5 * deviation
    assert np.array_equal(planted_clicks(0, 1000, 20, ROWS).inputs, planted_clicks(0, 1000, 20, ROWS).inputs)
    assert not np.array_equal(planted_clicks(1, 1000, 20, ROWS).labels, planted_clicks(0, 1000, 20, ROWS).labels)


def test_the_planted_auc_is_the_mean_over_all_labels() -> None:
    """Exactly the expected ordered pairs over the expected pairs, summed over every labelling of six samples; and what drawn ones give."""
    chance = np.array([0.1, 0.3, 0.3, 0.5, 0.8, 0.9])
    ordered = pairs = 0.0
    for code in range(64):
        labels = np.array([code >> place & 1 for place in range(6)])
        weight = np.prod(np.where(labels, chance, 1 - chance))
        positive, negative = chance[labels == 1][:, None], chance[labels == 0][None, :]
        ordered += weight * ((positive > negative) + 0.5 * (positive == negative)).sum()
        pairs += weight * labels.sum() * (6 - labels.sum())
    assert planted_auc(chance) == pytest.approx(ordered / pairs, abs=1e-12)
    clicks = planted_clicks(0, 200_000, 20, ROWS)
    assert clicks.planted is not None
    assert planted_auc(clicks.planted) == pytest.approx(roc_auc_score(clicks.labels, clicks.planted), abs=0.004)


def test_wide_and_deep_is_the_papers_equation() -> None:
    """The logit is a linear model's over numbers and rows plus a perceptron's over numbers and vectors."""
    model: Any = build_model("wide_deep", {"rows": 60, "dim": 4, "hidden": 7, "depth": 2}, "float64", 0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(60, (5, 26), generator=generator)
    numbers = torch.randn(5, 13, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model.wide_rows.weight.normal_(generator=generator)
        expected = []
        for sample in range(5):
            wide = sum(model.wide_rows.weight[row, 0] for row in rows[sample]) + model.wide.weight[0] @ numbers[sample] + model.wide.bias[0]
            hidden = torch.cat([numbers[sample], *(model.vectors.weight[row] for row in rows[sample])])
            for layer in (model.deep[0], model.deep[2]):
                hidden = (layer.weight @ hidden + layer.bias).clamp(min=0)
            expected.append(wide + model.deep[4].weight[0] @ hidden + model.deep[4].bias[0])
        found = model(torch.cat([numbers, rows.double()], 1))
    torch.testing.assert_close(found, torch.stack(expected))


def test_wide_and_deep_has_fleets_sizes() -> None:
    """1,000,001 rows of 10, a weight for each, and three layers of 400 over 13 numbers and 26 vectors."""
    with torch.device("meta"):
        model: Any = build_model_on_meta()
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert sizes["vectors.weight"] == (ROWS, 10)
    assert sizes["wide_rows.weight"] == (ROWS, 1)
    assert [shape for name, shape in sizes.items() if name.startswith("deep") and len(shape) == 2] == [
        (400, 273), (400, 400), (400, 400), (1, 400)
    ]  # fmt: skip


def build_model_on_meta() -> torch.nn.Module:
    """Without memory for its table."""
    from fleetbench.workloads.models.sparse import WideDeep

    return WideDeep()


def test_click_loss_is_the_logistic_one() -> None:
    """-log of the label's probability, its mean or its sum, and sparse gradients of the rows that a batch names."""
    model: Any = build_model("wide_deep", {"rows": 60, "dim": 2, "hidden": 4}, "float64", 0)
    samples = torch.cat([torch.ones(3, 13), torch.arange(26).expand(3, 26)], 1).double()
    labels = torch.tensor([1, 0, 1])
    logits = model(samples)
    expected = [math.log1p(math.exp(-z if label else z)) for z, label in zip(logits.tolist(), labels.tolist(), strict=True)]
    loss = loss_of("wide_deep")(logits, labels)
    assert float(loss.detach()) == pytest.approx(sum(expected) / 3)
    assert float(loss_of("wide_deep")(logits, labels, reduction="sum").detach()) == pytest.approx(sum(expected))
    loss.backward()
    for table in (model.vectors, model.wide_rows):
        assert table.weight.grad.is_sparse
        assert table.weight.grad.coalesce().indices()[0].tolist() == list(range(26))


@pytest.mark.slow
def test_training_reaches_the_planted_auc(tmp_path: Path) -> None:
    """Two epochs over 80,000 clicks bring the held-out AUC within 0.01 of the best there is, from 0.5."""
    workload = Workload(model="wide_deep", data="synthetic", model_options={"hidden": 64}, batch_size=100, lr=0.3)
    prepare(workload, 0, tmp_path)
    model = build_model("wide_deep", workload.model_options, "float32", 0)
    samples = num_training_samples(tmp_path)
    sampler = Sampler(num_samples=samples, batch_size=100, trainers=1, rank=0, seed=0, uneven="cut")
    reader, optimizer, compare = open_batches(workload, tmp_path, sampler), make_optimizer(model, workload), loss_of("wide_deep")
    before = held_out_metrics(model, "wide_deep", tmp_path)
    for position in range(2 * sampler.steps_per_epoch):
        inputs, labels = reader.batch(position)
        compare(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = held_out_metrics(model, "wide_deep", tmp_path)
    assert before.auc is not None
    assert after.auc is not None
    assert after.best_auc == planted_auc(np.load(tmp_path / "planted_eval.npy"))
    assert after.best_auc is not None
    assert before.auc < 0.6
    assert after.best_auc - 0.01 < after.auc < after.best_auc + 0.005
    assert after.loss < before.loss


@pytest.mark.parametrize(("changes", "where"), [({"optimizer": "adam"}, "optimizer"), ({"weight_decay": 0.1}, "weight_decay")])
def test_optimizers_that_take_no_sparse_gradients_are_refused(changes: dict[str, Any], where: str) -> None:
    """Before training starts, with the parameter's name."""
    workload = Workload(model="word2vec", data="synthetic", model_options={"vocab": 20}, **changes)
    with pytest.raises(ConfigError, match=rf"workload\.{where}: cannot update contexts\.weight") as caught:
        refuse_dense_optimizer(build_model("word2vec", {"vocab": 20}, "float32", 0), workload)
    assert caught.value.hint is not None
    assert ("parameter servers" in caught.value.hint) == (where == "optimizer")  # whose weight decay would be theirs, too
