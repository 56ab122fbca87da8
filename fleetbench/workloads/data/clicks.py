"""Clicks: what Wide & Deep learns from: 13 numbers and 26 categories a sample, and whether somebody clicked.

``criteo:FILE`` is Criteo's format: lines of 40 columns with tabs between them: the label, 13 whole
numbers, and 26 categories of at most 8 hexadecimal digits; any but the label may be missing. Numbers x
become sign(x) log(1 + |x|), and 0 where they are missing. A category's row in the table is a hash of
its column and its value (missing is a value too), the same in every process.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from fleetbench.workloads.data.reader import Read
from fleetbench.workloads.data.words import line_blocks
from fleetbench.workloads.models.data_options import data_source, sizes
from fleetbench.workloads.models.registry import model_option
from fleetbench.workloads.models.wide_deep import NUM_CATEGORICAL, NUM_COLUMNS, NUM_NUMERIC

Samples = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

BLOCK_BYTES = 2**24
"""Of a file that are read at a time."""
_MISSING = 2**32
"""What a missing category is hashed as: no 8 hexadecimal digits."""
_CATEGORY = re.compile(rb"[0-9a-fA-F]{1,8}")
_NAMES = ["label", *(f"I{number}" for number in range(1, NUM_NUMERIC + 1)), *(f"C{number}" for number in range(1, NUM_CATEGORICAL + 1))]
_BIAS, _SPREAD = -1.5, 0.4
"""Of planted log-odds: what they are without features, and how much each feature moves them."""


def read_clicks(workload: Workload, seed: int) -> Read:
    """A workload's clicks: samples ``(samples, 39)``, laid out as ``fleetbench.workloads.models.wide_deep`` says, with labels 0 and 1.

    Raises ``ConfigError`` for a file that cannot be read, naming the line.
    """
    rows, size = model_option(workload, "rows"), sizes(workload, "clicks")
    if data_source(workload) == "synthetic":
        return planted_clicks(seed, size["samples"], size["categories"], rows)
    return read_criteo(Path(workload.data.partition(":")[2]), rows, size["samples"])


def hashed(column: npt.ArrayLike, value: npt.ArrayLike, rows: int) -> npt.NDArray[np.int64]:
    """Row of a category: SplitMix64's output function (Steele, Lea and Flood 2014) of column x 2^33 + value, modulo ``rows``.

    ``column`` counts from 0, ``value`` is below 2^33; both broadcast.
    """
    with np.errstate(over="ignore"):
        z = (np.asarray(column, dtype=np.uint64) << np.uint64(33)) + np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % np.uint64(rows)).astype(np.int64)


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


def read_criteo(path: Path, rows: int, most_samples: int | None = None) -> Read:
    """A file in Criteo's format, its first ``most_samples`` lines; raises ``ConfigError`` naming a line that is none."""
    samples: list[Samples] = []
    labels: list[Labels] = []
    line = 1
    hint = "criteo:FILE names a file of tab-separated lines"
    for block in line_blocks(path, str(path), hint, BLOCK_BYTES):
        found, their = _parse(block, rows, str(path), line)
        samples.append(found)
        labels.append(their)
        line += len(their)
        if most_samples is not None and line > most_samples:
            break
    if not labels:
        raise ConfigError("holds no line", "workload.data", str(path), "40 columns a line: label, 13 numbers, 26 categories")
    return Read(np.concatenate(samples)[:most_samples], np.concatenate(labels)[:most_samples])


def _parse(block: bytes, rows: int, name: str, first_line: int) -> tuple[Samples, Labels]:
    import pyarrow as pa
    from pyarrow import csv

    kinds = {name: pa.binary() for name in _NAMES} | {name: pa.int64() for name in _NAMES[: 1 + NUM_NUMERIC]}
    try:
        table = csv.read_csv(
            io.BytesIO(block),
            read_options=csv.ReadOptions(column_names=_NAMES, use_threads=False),
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True, check_utf8=False),
        )
    except pa.ArrowInvalid as error:
        raise _malformed(block, name, first_line) or ConfigError(f"is not Criteo's format: {error}", name, hint=_HINT) from None
    samples = np.empty((table.num_rows, NUM_COLUMNS), dtype=np.float32)
    for place, column in enumerate(_NAMES[1 : 1 + NUM_NUMERIC]):
        numbers = table.column(column).fill_null(0).to_numpy().astype(np.float64)
        samples[:, place] = np.sign(numbers) * np.log1p(np.abs(numbers))
    good = True
    for place, column in enumerate(_NAMES[1 + NUM_NUMERIC :]):
        values, fits = _categories(table.column(column))
        good = good and fits
        samples[:, NUM_NUMERIC + place] = hashed(place, values, rows)
    labels = table.column("label")
    if not good or labels.null_count or not set(np.unique(labels.to_numpy())) <= {0, 1}:
        raise _malformed(block, name, first_line) or ConfigError("is not Criteo's format", name, hint=_HINT)
    return samples, labels.to_numpy().astype(np.int64)


_HINT = "40 columns with tabs between them: label 0 or 1, 13 whole numbers, 26 categories of at most 8 hexadecimal digits; missing is empty"


def _categories(column: Any) -> tuple[Words, bool]:
    """Hexadecimal digits as numbers, missing ones as ``_MISSING``; whether all of them were."""
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    good = all(map(_CATEGORY.fullmatch, texts))
    numbers = np.array([*(int(text, 16) if good else 0 for text in texts), _MISSING], dtype=np.uint64)
    return numbers[encoded.indices.fill_null(len(texts)).to_numpy()], good


def _malformed(block: bytes, name: str, first_line: int) -> ConfigError | None:
    """What is wrong with the first line that is wrong."""
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first_line):
        fields = line.removesuffix(b"\r").split(b"\t")
        where = f"{name}, line {number}"
        if len(fields) != len(_NAMES):
            return ConfigError(f"has {len(fields)} columns instead of {len(_NAMES)}", where, hint=_HINT)
        if fields[0] not in (b"0", b"1"):
            return ConfigError("the label is 0 or 1", where, repr(fields[0].decode(errors="replace")), _HINT)
        for column, text in zip(_NAMES[1:], fields[1:], strict=True):
            fits = _is_number(text) if column.startswith("I") else _CATEGORY.fullmatch(text)
            if text and not fits:
                what = "is no whole number" if column.startswith("I") else "is not at most 8 hexadecimal digits"
                return ConfigError(f"column {column} {what}", where, repr(text.decode(errors="replace")), _HINT)
    return None


def _is_number(text: bytes) -> bool:
    digits = text.removeprefix(b"-")
    return digits.isdigit() and int(digits) < 2**63
