"""Registry of models by name, with the data that fit them, and the options of both with their defaults."""

import math
from collections.abc import Callable, Mapping
from inspect import signature

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.errors import ConfigError
from fleetbench.workload import ModelOption, Workload
from fleetbench.workloads.models.resnet import resnet50
from fleetbench.workloads.models.sparse import MOST_ROWS, SkipGram, WideDeep, click_loss, skip_gram_loss
from fleetbench.workloads.models.transformers import Gpt, Llama, bert_base, next_token_loss


def mlp(features: int = 32, classes: int = 10, hidden: int = 64, depth: int = 2) -> nn.Module:
    """Return a perceptron of ``depth`` hidden layers of ``hidden`` units.

    Its input is ``(batch, ...)``, with ``features`` elements per sample.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = features
    for _ in range(depth):
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))


def digits_mlp(hidden: int = 256, depth: int = 2) -> nn.Module:
    """Return ``mlp`` for 8 x 8 digits in 10 classes."""
    return mlp(features=64, classes=10, hidden=hidden, depth=depth)


def digits_cnn(channels: int = 32, hidden: int = 128) -> nn.Module:
    """Return two convolutions and two linear layers for digits in 10 classes; input ``(batch, 8, 8)``."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


Loss = Callable[..., torch.Tensor]
"""Function from the model's output and the labels to the loss of a batch, one number. With
``reduction="sum"`` it sums over the batch instead of averaging."""
DIGITS_FEATURES = 64
NUM_BYTES = 256
"""Number of byte classes; one more token stands for the masked byte."""

_MODELS: Mapping[str, tuple[Callable[..., nn.Module], str]] = {
    "mlp": (mlp, "features"),
    "digits_mlp": (digits_mlp, "digits"),
    "digits_cnn": (digits_cnn, "digits"),
    "resnet50": (resnet50, "images"),
    "bert_base": (bert_base, "tokens"),
    "gpt": (Gpt, "tokens"),
    "llama": (Llama, "tokens"),
    "wide_deep": (WideDeep, "clicks"),
    "word2vec": (SkipGram, "pairs"),
}
MODELS = {name: make for name, (make, _) in _MODELS.items()}
INPUTS = {name: inputs for name, (_, inputs) in _MODELS.items()}
"""Input of each model: a batch of ``features`` (n), ``digits`` (8, 8), ``images`` (3, size, size), ``tokens``
(length), ``clicks`` (39 columns, see ``fleetbench.workloads.models.sparse``) or ``pairs`` (a word, its
neighbour, and negatives)."""

LOSSES: Mapping[str, Loss] = {"gpt": next_token_loss, "llama": next_token_loss, "wide_deep": click_loss, "word2vec": skip_gram_loss}
"""Loss functions of the models that are not trained with cross-entropy."""

_SAMPLES: Mapping[str, Callable[[Mapping[str, int]], tuple[int, ...]]] = {
    "digits": lambda _: (8, 8),
    "images": lambda size: (3, size["image_size"], size["image_size"]),
    "tokens": lambda size: (size["length"],),
    "clicks": lambda _: (39,),
    "pairs": lambda size: (2 + size["negatives"],),
}
"""Shape of one sample of each kind of input."""
SUBSAMPLE = 1e-3
"""Frequency above which occurrences of a word are subsampled."""
_IMAGES: Mapping[str, int] = {"image_size": 224, "workers": 2, "held_out": 200}
_TEXT: Mapping[str, int] = {"length": 128, "held_out": 200}
_WORDS: Mapping[str, int | float] = {"min_count": 5, "window": 5, "negatives": 5, "subsample": SUBSAMPLE, "held_out": 10_000}
_SYNTHETIC: Mapping[str, Mapping[str, int | float]] = {
    "features": {"samples": 10_000, "teacher": 0, "noise": 0.0},
    "digits": {"samples": 10_000},
    "images": {"samples": 512, "image_size": 224},
    "tokens": {"samples": 1_000, "length": 128},
    "pairs": {"samples": 100_000, "negatives": 5, "held_out": 10_000},
    "clicks": {"samples": 100_000, "categories": 20, "held_out": 20_000},
}

_FED_BY: Mapping[str, tuple[str, ...]] = {
    "digits": ("digits", "features"),
    "synthetic": ("digits", "features", "images", "tokens", "clicks", "pairs"),
    "imagenet": ("images",),
    "pydocs": ("tokens", "pairs"),
    "text": ("tokens", "pairs"),
}
"""Kinds of inputs that each data source can provide."""


def check_model(workload: Workload) -> None:
    """Raise ``ConfigError`` for an unknown model, data or option, or for data that do not fit the model."""
    _check_model_options(workload.model, workload.model_options)
    source, inputs = data_source(workload), INPUTS[workload.model]
    if inputs not in _FED_BY.get(source, ()):
        feeds = " or ".join(name for name, kinds in _FED_BY.items() if inputs in kinds)
        hint = f"one of {feeds} (imagenet:DIR, text:FILE)"
        raise ConfigError(f"is not what {workload.model} is fed with", "workload.data", repr(workload.data), hint)
    _check_options("data_options", workload.data_options, _defaults(workload, inputs), workload.data)
    size = sizes(workload, inputs)
    limits = {
        "model_options.features": (inputs == "features" and source == "digits", DIGITS_FEATURES, DIGITS_FEATURES),
        "model_options.rows": (inputs == "clicks", 1, MOST_ROWS),
        "model_options.vocab": (inputs == "tokens" and source != "synthetic", NUM_BYTES + 1, math.inf),
        "model_options.classes": (workload.model == "bert_base" and source != "synthetic", NUM_BYTES, math.inf),
        "data_options.length": (inputs == "tokens", 1, model_option(workload, "positions") if inputs == "tokens" else 0),
        "data_options.image_size": (inputs == "images" and workload.batch_size == 1, 33, math.inf),  # batch norm needs two values
    }
    for name, (applies, least, most) in limits.items():
        table, _, option = name.partition(".")
        if applies and not least <= (value := size[option] if table == "data_options" else model_option(workload, option)) <= most:
            bounds = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")
            raise ConfigError(
                f"must be {bounds} with this model and data",
                f"workload.{name}",
                str(value),
                f"{option} = {least if value < least else most}",
            )


def _check_model_options(name: str, options: Mapping[str, ModelOption]) -> None:
    if name not in MODELS:
        raise ConfigError("not a model that can be executed", "workload.model", repr(name), f"one of {', '.join(MODELS)}")
    known = {option: parameter.default for option, parameter in signature(MODELS[name]).parameters.items()}
    _check_options("model_options", options, known, name)
    given = {"head_size": 2, **known, **options}
    for whole, part in (("hidden", "heads"), ("heads", "kv_heads")):
        if int(given.get(whole, 1)) % int(given.get(part, 1)):
            raise ConfigError(
                f"does not divide {whole}", f"workload.model_options.{part}", str(given[part]), f"a divisor of {given[whole]}"
            )
    if int(given["head_size"]) % 2:
        raise ConfigError("must be even", "workload.model_options.head_size", str(given["head_size"]), "its numbers are turned in pairs")


def _check_options(table: str, options: Mapping[str, ModelOption], known: Mapping[str, int | float], taker: str) -> None:
    """Raise ``ConfigError`` for an unknown option, or a value that it cannot have."""
    for option, value in options.items():
        where = f"workload.{table}.{option}"
        if option not in known:
            hint = f"{taker} takes {', '.join(known) or 'none'}; --set 'workload.{table}={{}}' drops them"
            raise ConfigError("not an option here", where, repr(value), hint)
        kind = type(known[option])
        is_number = type(value) is kind or (kind is float and type(value) is int)
        if not is_number or not (kind is bool or 0 < float(value) < math.inf):
            what = {bool: "true or false", int: "a whole number of at least 1", float: "a number above 0"}[kind]
            raise ConfigError(f"must be {what}", where, repr(value), f"for example {option} = {known[option] or 0.1}")


def model_option(workload: Workload, option: str) -> int:
    """Return the value of a model's option, as given or by default."""
    return int(workload.model_options.get(option, signature(MODELS[workload.model]).parameters[option].default))


def loss_of(model: str) -> Loss:
    """Return the loss that a registry model is trained with."""
    return LOSSES.get(model, cross_entropy)


def build_model(name: str, options: Mapping[str, ModelOption], dtype: str, seed: int) -> nn.Module:
    """Return the model with initial parameters that depend only on ``seed``.

    torch's global generator is left unchanged.
    """
    _check_model_options(name, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](**options).to(getattr(torch, dtype))


def placeholder_model(workload: Workload) -> nn.Module:
    """Return the model without data, on torch's ``meta`` device.

    Raises ``ConfigError`` as ``check_model`` does.
    """
    check_model(workload)
    with torch.device("meta"):
        return MODELS[workload.model](**workload.model_options).to(getattr(torch, workload.dtype))


def placeholder_batch(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of one trainer's batch, all zeros."""
    kind, size = INPUTS[workload.model], sizes(workload, INPUTS[workload.model])
    shape = (model_option(workload, "features"),) if kind == "features" else _SAMPLES[kind](size)
    dtype = torch.int64 if kind in ("tokens", "pairs") else getattr(torch, workload.dtype)
    return torch.zeros(workload.batch_size, *shape, dtype=dtype), torch.zeros(workload.batch_size, dtype=torch.int64)


def data_source(workload: Workload) -> str:
    """Return ``workload.data`` up to its colon: ``digits``, ``synthetic``, ``imagenet``, ...."""
    return workload.data.partition(":")[0]


def _defaults(workload: Workload, inputs: str) -> Mapping[str, int | float]:
    if data_source(workload) == "synthetic":
        return _SYNTHETIC[inputs]
    text = _WORDS if inputs == "pairs" else _TEXT
    by_source: Mapping[str, Mapping[str, int | float]] = {"imagenet": _IMAGES, "pydocs": text, "text": text}
    return by_source.get(data_source(workload), {})


def sizes(workload: Workload, inputs: str) -> dict[str, int]:
    """Return the whole-number options of the data, as given or by default, for a model with this kind of ``inputs``.

    ``samples``: number of synthetic samples, a fifth of them held out. ``image_size``: pixels per side.
    ``length``: tokens per sample. ``workers``: decoding threads per trainer. ``held_out``: largest number of
    samples in the held-out loss. ``min_count``: least number of occurrences of a word. ``window``: largest
    distance between neighbours. ``negatives``: words drawn for every neighbour. ``categories``: values of
    each synthetic column. ``teacher``: hidden units of the function that labels synthetic features, or 0 if
    it is linear.
    """
    given: dict[str, ModelOption] = {**_defaults(workload, inputs), **workload.data_options}
    return {name: value for name, value in given.items() if isinstance(value, int)}
