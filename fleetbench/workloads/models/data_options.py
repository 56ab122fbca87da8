"""The sizes of a workload's data, ``workload.data_options``: which there are, and their defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fleetbench.errors import ConfigError
from fleetbench.workload import ModelOption, Workload

SUBSAMPLE = 1e-3
"""Frequency above which a word's occurrences are thinned out; the only option that need not be whole."""
_IMAGES: Mapping[str, int] = {"image_size": 224, "workers": 2, "held_out": 200}
_TEXT: Mapping[str, int] = {"length": 128, "held_out": 200}
_WORDS: Mapping[str, int | float] = {"min_count": 5, "window": 5, "negatives": 5, "subsample": SUBSAMPLE, "held_out": 10_000}
_SYNTHETIC: Mapping[str, Mapping[str, int | float]] = {
    "features": {"samples": 10_000},
    "digits": {"samples": 10_000},
    "images": {"samples": 512, "image_size": 224},
    "tokens": {"samples": 1_000, "length": 128},
    "pairs": {"samples": 100_000, "negatives": 5, "held_out": 10_000},
    "clicks": {"samples": 100_000, "categories": 20, "held_out": 20_000},
}


def data_source(workload: Workload) -> str:
    """``workload.data`` up to its colon: ``digits``, ``synthetic``, ``imagenet``, ...."""
    return workload.data.partition(":")[0]


def _defaults(workload: Workload, inputs: str) -> Mapping[str, int | float]:
    if data_source(workload) == "synthetic":
        return _SYNTHETIC[inputs]
    text = _WORDS if inputs == "pairs" else _TEXT
    by_source: Mapping[str, Mapping[str, int | float]] = {"imagenet": _IMAGES, "pydocs": text, "text": text}
    return by_source.get(data_source(workload), {})


def sizes(workload: Workload, inputs: str) -> dict[str, int]:
    """The data's numbers, as given or by default, for a model that is fed with ``inputs``.

    ``samples``: of synthetic data, a fifth of them held out. ``image_size``: pixels a side.
    ``length``: tokens of a sample. ``workers``: processes that decode, for every trainer.
    ``held_out``: samples at most in the held-out loss, where the data are larger.
    ``min_count``: how often a word occurs at least. ``window``: words at most between neighbours, and one.
    ``negatives``: words drawn beside every neighbour. ``categories``: values of each synthetic column.
    """
    given: dict[str, ModelOption] = {**_defaults(workload, inputs), **workload.data_options}
    return {name: value for name, value in given.items() if isinstance(value, int)}


def check_data_options(workload: Workload, inputs: str) -> None:
    """Raise ``ConfigError`` for an option that these data do not have, or a value that it cannot have."""
    known = _defaults(workload, inputs)
    for option, value in workload.data_options.items():
        where = f"workload.data_options.{option}"
        if option not in known:
            hint = f"{workload.data} takes {', '.join(known) or 'none'}"
            raise ConfigError("not an option of this data", where, repr(value), hint)
        if isinstance(known[option], float):
            if type(value) not in (int, float) or not 0 < float(value) < math.inf:
                raise ConfigError("must be a number above 0", where, repr(value), f"for example {option} = {known[option]}")
        elif type(value) is not int or value < 1:
            raise ConfigError("must be a whole number of at least 1", where, repr(value), f"for example {option} = {known[option]}")
