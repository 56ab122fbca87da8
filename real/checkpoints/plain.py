"""Plain data with tensors in it: as JSON, the tensors set apart under names.

What schedulers and optimizers call their ``state_dict()`` is such data: numbers, text, lists, tuples,
dictionaries with any plain keys, counters, numpy's arrays, and tensors. Reading it back gives the same types and, for
floats, the same bits. Nothing in it can be code.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fleetbench.errors import ConfigError

_TAG = "$"
Tensors = dict[str, torch.Tensor]


def pack(value: Any, tensors: Tensors, name: str, where: str) -> Any:
    """``value`` for ``json.dumps``; the tensors in it go to ``tensors``, under names that begin with ``name``.

    Raises ``ConfigError`` for anything else, naming ``where`` it was given and the place in it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "text": repr(float(value))}
    if isinstance(value, torch.Tensor):
        key = name
        while key in tensors:
            key += "'"
        tensors[key] = value.detach()
        return {_TAG: "tensor", "name": key}
    if isinstance(value, np.generic | np.ndarray):
        return _pack_numpy(value, tensors, name, where)
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{index}", where) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        return _pack_mapping(value, tensors, name, where)
    raise _no_plain_data(value, name, where)


def _no_plain_data(value: Any, name: str, where: str) -> ConfigError:
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    hint = "give numbers, text, lists, dictionaries, arrays and tensors, such as scheduler.state_dict()"
    return ConfigError("can be saved as no plain data", f"{where}: {name}", what, hint)


def _pack_numpy(value: Any, tensors: Tensors, name: str, where: str) -> Any:
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, name, where)
    try:
        tensor = torch.from_numpy(np.array(value, order="C"))  # a copy, which may be written to
    except (TypeError, ValueError):
        raise _no_plain_data(value, name, where) from None
    return {_TAG: "array", "of": pack(tensor, tensors, name, where)}


def _pack_mapping(value: Mapping[Any, Any], tensors: Tensors, name: str, where: str) -> Any:
    counts = isinstance(value, Counter)
    if not counts and all(type(key) is str for key in value) and _TAG not in value:
        return {key: pack(item, tensors, f"{name}/{key}", where) for key, item in value.items()}
    pairs = [[pack(key, tensors, name, where), pack(item, tensors, f"{name}/{key}", where)] for key, item in value.items()]
    return {_TAG: "counter" if counts else "map", "items": pairs}


def unpack(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that ``pack`` was given, tensors copied. Raises ``ValueError`` or ``KeyError`` for what ``pack`` never wrote."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    return _unpack_mapping(data, tensors)


def _unpack_mapping(data: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    match data.get(_TAG):
        case None:
            return {key: unpack(item, tensors) for key, item in data.items()}
        case "float":
            return float(data["text"])
        case "tensor":
            return tensors[data["name"]].clone()
        case "array":
            return unpack(data["of"], tensors).numpy()
        case "tuple":
            return tuple(unpack(item, tensors) for item in data["items"])
        case "map" | "counter" as kind:
            pairs = {unpack(key, tensors): unpack(item, tensors) for key, item in data["items"]}
            return Counter(pairs) if kind == "counter" else pairs
        case other:
            raise ValueError(f"no kind of plain data: {other!r}")
