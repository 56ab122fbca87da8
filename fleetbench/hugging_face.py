"""Models as Hugging Face publishes them: a ``config.json`` becomes a registry model with options."""

import json
from collections.abc import Mapping
from typing import Any

from fleetbench.digests import read_text, reading
from fleetbench.errors import ConfigError

_LLAMA = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "positions": "max_position_embeddings",
}
_GPT2 = {"vocab": "vocab_size", "hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"}
_KINDS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {
    "gpt2": ("gpt", _GPT2, {"tie_word_embeddings": True, "activation_function": "gelu_new", "add_cross_attention": False}),
    "bert": ("bert_base", _LLAMA, {"hidden_act": "gelu", "type_vocab_size": 2, "is_decoder": False}),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3"),
        ("llama", _LLAMA, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}),
    ),
}
"""For each ``model_type``: the registry's model, the file's key for each of the model's options, and the values
that other keys must have if they are given."""


def expanded(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an undecoded experiment whose ``config.json`` is replaced by the registry's model and options.

    Rotary bases and the epsilons of norms, which do not affect time, are the registry's. Raises
    ``ConfigError`` for a file that cannot be read, for a model that the registry lacks, and if options are
    given as well.
    """
    workload = data.get("workload")
    if not isinstance(workload, Mapping) or not str(workload.get("model")).endswith(".json"):
        return data
    if workload.get("model_options"):
        hint = "leave one of them out: --set 'workload.model_options={}' drops those of another model"
        raise ConfigError("a config.json has all options", "workload.model_options", repr(workload["model_options"]), hint)
    name, options = _read(str(workload["model"]))
    return {**data, "workload": {**workload, "model": name, "model_options": options}}


def _read(path: str) -> tuple[str, dict[str, Any]]:
    hint = "workload.model names a config.json of Hugging Face"
    text = read_text(path, hint)
    with reading(path, hint):
        config = dict(json.loads(text))
    kind = str(config.get("model_type"))
    if kind not in _KINDS:
        hint = f"one of {', '.join(_KINDS)}; or declare another model's layers in workload.layers"
        raise ConfigError("not a model_type that the registry has", f"{path}: model_type", repr(kind), hint)
    model, keys, required = _KINDS[kind]
    with reading(path, hint):
        options: dict[str, Any] = {option: config[key] for option, key in keys.items()}
        if kind == "gpt2":
            required = {**required, "n_inner": 4 * config["n_embd"]}
        if model == "llama":
            options["kv_heads"] = config.get("num_key_value_heads") or options["heads"]
            options["head_size"] = config.get("head_dim") or options["hidden"] // options["heads"]
            options |= {"tied": config.get("tie_word_embeddings", False), "qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3"}
            if (window := config.get("sliding_window")) and config.get("use_sliding_window", True):
                # in the registry a token attends to all earlier ones, which is the same within the window
                options["positions"] = min(options["positions"], window)
    for key, value in required.items():
        if config.get(key) not in (None, value):
            what = f"the registry's {model} has {key} = {value!r}"
            raise ConfigError(what, f"{path}: {key}", repr(config[key]), "declare the model's layers in workload.layers instead")
    return model, options
