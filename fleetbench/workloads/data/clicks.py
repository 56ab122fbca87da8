"""Clicks: what Wide & Deep learns from: 13 numbers and 26 categories a sample, and whether somebody clicked.

A category's row in the table is a hash of its column and its value, the same in every process.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleetbench.stragglers import splitmix64
from fleetbench.workload import Workload
from fleetbench.workloads.data.reader import Read
from fleetbench.workloads.models.data_options import sizes
from fleetbench.workloads.models.registry import model_option
from fleetbench.workloads.models.wide_deep import NUM_CATEGORICAL, NUM_NUMERIC

_BIAS, _SPREAD = -1.5, 0.4
"""Of planted log-odds: what they are without features, and how much each feature moves them."""


def read_clicks(workload: Workload, seed: int) -> Read:
    """Synthetic clicks: samples ``(samples, 39)``, laid out as ``fleetbench.workloads.models.wide_deep`` says, with labels 0 and 1."""
    size = sizes(workload, "clicks")
    return planted_clicks(seed, size["samples"], size["categories"], model_option(workload, "rows"))


def hashed(column: npt.ArrayLike, value: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    """Row of a category: SplitMix64's hash of column x 2^33 + value, modulo ``rows``.

    ``column`` counts from 0, ``value`` is below 2^33; both broadcast.
    """
    words = (np.asarray(column, dtype=np.uint64) << np.uint64(33)) + np.asarray(value, dtype=np.uint64)
    return np.asarray(splitmix64(words) % np.uint64(rows), dtype=np.int64)


def planted_clicks(seed: int, num_samples: int, num_categories: int, rows: int) -> Read:
    """Clicks drawn from known probabilities: their log-odds are linear in 13 normal numbers and in the weights of 26 categories.

    Each column has ``num_categories`` values, frequent and rare ones (Zipf, exponent 1). No classifier
    has a larger expected AUC than the one that ranks by ``planted``.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    chance = 1.0 / np.arange(1, num_categories + 1)
    values = generator.choice(num_categories, (num_samples, NUM_CATEGORICAL), p=chance / chance.sum())
    numbers = generator.standard_normal((num_samples, NUM_NUMERIC)).astype(np.float32)
    weights = generator.normal(0.0, _SPREAD, (NUM_CATEGORICAL, num_categories))
    slopes = generator.normal(0.0, _SPREAD, NUM_NUMERIC)
    columns = np.arange(NUM_CATEGORICAL)
    log_odds = _BIAS + numbers @ slopes + weights[columns, values].sum(axis=1)
    planted = 1.0 / (1.0 + np.exp(-log_odds))
    labels = (generator.random(num_samples) < planted).astype(np.int64)
    samples = np.concatenate([numbers, hashed(columns, values, rows).astype(np.float32)], axis=1)
    return Read(samples, labels, planted=planted)
