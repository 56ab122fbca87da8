"""The registry's models and the data that feed them, against published numbers and written-out equations."""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import tomllib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import Batches, held_out, num_training_samples, open_batches, prepare
from fleetbench.workloads.data.reader import Sampler
from fleetbench.workloads.models.registry import INPUTS, MODELS, build_model, check_model, placeholder_model
from real.layer_times import LayerClock
from resnet50 import resnet50_gradients

TINY_RESNET = {"classes": 10, "width": 4}
TINY_BERT = {"vocab": 50, "hidden": 12, "layers": 2, "heads": 3, "ffn": 20, "positions": 16, "classes": 10}
TINY: dict[str, dict[str, int]] = {"resnet50": TINY_RESNET, "bert_base": TINY_BERT}
SPARSE: dict[str, dict[str, int]] = {"wide_deep": {"rows": 50, "hidden": 8}, "word2vec": {"vocab": 50, "dim": 4}}
TINY_GPT = {"vocab": 50, "hidden": 8, "layers": 1, "heads": 2, "positions": 16}
TINY_LLAMA = {"vocab": 50, "hidden": 8, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 6, "ffn": 12, "positions": 16}
SMALL = TINY | SPARSE | {"gpt": TINY_GPT, "llama": TINY_LLAMA}
SHAPES = {"features": (4, 32), "digits": (4, 8, 8), "images": (4, 3, 40, 40), "tokens": (4, 7), "clicks": (4, 39), "pairs": (4, 11)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models, and perhaps other processes on the cores: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sampler(folder: Path, batch_size: int = 8) -> Sampler:
    return Sampler(num_samples=num_training_samples(folder), batch_size=batch_size, trainers=1, rank=0, seed=0, uneven="cut")


@pytest.mark.parametrize("name", list(MODELS))
def test_models_are_a_function_of_their_seed(name: str) -> None:
    """The same seed gives the same parameters, another seed others, and the global generator is left alone."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, same, other = (build_model(name, SMALL.get(name, {}), "float64", seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    inputs = torch.zeros(SHAPES[INPUTS[name]], dtype=torch.int64 if INPUTS[name] in ("tokens", "pairs") else torch.float64)
    assert one(inputs).shape == {"wide_deep": (4,), "gpt": (4, 6), "llama": (4, 6)}.get(name, (4, 10))


def test_unknown_options_are_refused_by_name() -> None:
    """A misspelt option and a wrong value are errors with the option's name."""
    for options in ({"hiden": 3}, {"hidden": 0}, {"hidden": 2.5}):
        with pytest.raises(ConfigError, match="hid"):
            build_model("digits_mlp", options, "float32", 0)


def test_resnet50_has_the_published_parameters() -> None:
    """161 tensors and 25,557,032 parameters at 1,000 classes; at 102 the paper's layer table, in names, sizes and order."""
    with torch.device("meta"):
        full, flowers = MODELS["resnet50"](), MODELS["resnet50"](classes=102)
    assert len(list(full.parameters())) == 161
    assert sum(parameter.numel() for parameter in full.parameters()) == 25_557_032
    table = [(gradient.name, gradient.numel) for gradient in reversed(resnet50_gradients(classes=102))]
    assert [(name, parameter.numel()) for name, parameter in flowers.named_parameters()] == table


@pytest.mark.slow
def test_resnet50_computes_as_much_as_published() -> None:
    """4.09 G multiply-adds for an image of 224 x 224 (torchvision's table of models), which strides and sizes must be right for."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        logits = MODELS["resnet50"]()(torch.zeros(1, 3, 224, 224))
    assert logits.shape == (1, 1000)
    assert counter.get_total_flops() / 2e9 == pytest.approx(4.09, abs=0.005)


def test_resnet50s_blocks_have_shortcuts() -> None:
    """Where the last batch norm of a block gives zero, the block gives what comes in, or its projection, through a ReLU."""
    model: Any = build_model("resnet50", TINY_RESNET, "float64", 0).eval()
    inputs = torch.randn(2, 16, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for block in (model.layer1[1], model.layer2[0]):
        nn.init.zeros_(block.bn3.weight)
        expected = inputs if block.downsample is None else block.downsample(inputs)
        torch.testing.assert_close(block(inputs), expected.relu())
    assert model.layer2[0](inputs).shape == (2, 32, 3, 3)


def test_bert_bases_encoder_has_the_published_parameters() -> None:
    """109,482,240 parameters in embeddings, encoder and pooler, as in the published uncased model."""
    with torch.device("meta"):
        model: Any = MODELS["bert_base"]()
    assert sum(parameter.numel() for parameter in model.bert.parameters()) == 109_482_240
    assert sum(parameter.numel() for parameter in model.classifier.parameters()) == 768 * 2 + 2


LLAMA = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 4096, "num_attention_heads": 32}
PUBLISHED: list[tuple[int, dict[str, Any]]] = [
    (
        8_030_261_248,  # Llama-3-8B
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    (6_738_415_616, LLAMA | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}),
    (
        7_241_732_096,  # Mistral-7B-v0.1
        LLAMA
        | {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    (
        494_032_768,  # Qwen2-0.5B
        LLAMA
        | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "sliding_window": 2048,
            "use_sliding_window": False,
        },
    ),
    (
        8_190_735_360,  # Qwen3-8B
        LLAMA
        | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
        | {"num_key_value_heads": 8, "vocab_size": 151936},
    ),
    (
        124_439_808,
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None},
    ),
    (
        109_482_240 + 768 * 2 + 2,  # bert-base-uncased, and the classifier
        {"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu"},
    ),
]
"""Parameters as published with the checkpoints, and of each ``config.json`` what says them."""


def _experiment_of(config: object, folder: Path, **workload: Any) -> Experiment:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return Experiment.from_dict({"workload": {"model": str(path), "data": "synthetic", **workload}})


@pytest.mark.sample(3)
@pytest.mark.parametrize(("count", "config"), PUBLISHED)
def test_a_config_json_is_a_model_with_the_published_parameters(count: int, config: dict[str, Any], tmp_path: Path) -> None:
    """Counted on the meta device; the resolved experiment names no file."""
    experiment = _experiment_of(config, tmp_path)
    model = placeholder_model(experiment.workload)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    (tmp_path / "config.json").unlink()
    assert Experiment.from_dict(tomllib.loads(experiment.to_toml())) == experiment


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mixtral"}, "not a model_type"),
        ({"model_type": ["llama"]}, "not a model_type"),
        (PUBLISHED[2][1] | {"sliding_window": "4k"}, "not supported"),
        ([], "not a model_type"),
        ("{", "is damaged, or of another kind"),
        (PUBLISHED[0][1] | {"attention_bias": True}, "attention_bias = False"),
        (PUBLISHED[5][1] | {"n_inner": 768}, "n_inner = 3072"),
        (PUBLISHED[6][1] | {"type_vocab_size": 1}, "type_vocab_size = 2"),
        ({"model_type": "llama", "vocab_size": 5}, "hidden_size"),
    ],
)
def test_a_config_json_of_another_model_is_refused(config: object, message: str, tmp_path: Path) -> None:
    """By what it is, or has, or lacks."""
    with pytest.raises(ConfigError, match=message) as caught:
        _experiment_of(config, tmp_path)
    assert "config.json" in str(caught.value)


def test_options_beside_a_config_json_are_refused(tmp_path: Path) -> None:
    """Those of the model that the file named before would change it unseen."""
    with pytest.raises(ConfigError, match="has all options"):
        _experiment_of(PUBLISHED[0][1], tmp_path, model_options={"layers": 2})


def test_a_sliding_window_ends_the_positions(tmp_path: Path) -> None:
    """Mistral's tokens see 4,096 before them, so that longer samples would be counted wrongly."""
    assert _experiment_of(PUBLISHED[2][1], tmp_path).workload.model_options["positions"] == 4096
    assert _experiment_of(PUBLISHED[3][1], tmp_path).workload.model_options["positions"] == 4096  # its own; the window is off


def test_llama_is_the_papers_equations() -> None:
    """Costs of a small model are those of the written-out decoder: complex rotations, and each head with its group's keys and values."""
    model: Any = build_model("llama", TINY_LLAMA | {"qkv_bias": True, "qk_norm": True, "tied": False}, "float64", 0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * norm.weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(7.0, dtype=torch.float64), torch.tensor([1e4 ** (-i / 3) for i in range(3)]).double())
        complexes = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((complexes.real, complexes.imag), -1)

    hidden = model.tokens.weight[tokens]
    for block in model.blocks:
        x = normed(hidden, block.norm1)
        queries, keys, values = ((x @ part.weight.T + part.bias).split(6, -1) for part in (block.query, block.key, block.value))
        mixed = []
        for head, query in enumerate(queries):
            q, k = turned(normed(query, block.query_norm)), turned(normed(keys[head // 2], block.key_norm))
            scores = (q @ k.mT / 6**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ values[head // 2])
        hidden = hidden + torch.cat(mixed, -1) @ block.output.weight.T
        x = normed(hidden, block.norm2)
        gate = x @ block.gate.weight.T
        hidden = hidden + (gate * gate.sigmoid() * (x @ block.up.weight.T)) @ block.down.weight.T
    logits = normed(hidden, model.norm) @ model.head.weight.T
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(3, 6)
    torch.testing.assert_close(model(tokens), expected)


def test_bert_is_the_papers_equations() -> None:
    """Logits of a small model are those of the written-out transformer, post-normalised, head by head."""
    model: Any = build_model("bert_base", TINY_BERT, "float64", 0)
    bert = model.bert
    tokens = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))

    def normalised(x: torch.Tensor, norm: Any) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * norm.weight + norm.bias

    def attended(x: torch.Tensor, attention: Any) -> torch.Tensor:
        queries, keys, values = ((x @ weight.T + bias).split(4, -1) for weight, bias in zip(
            attention.in_proj_weight.split(12), attention.in_proj_bias.split(12), strict=True
        ))  # fmt: skip
        heads = [(q @ k.mT / math.sqrt(4)).softmax(-1) @ v for q, k, v in zip(queries, keys, values, strict=True)]
        return torch.cat(heads, -1) @ attention.out_proj.weight.T + attention.out_proj.bias

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), alpha=0.1)
        hidden = bert.word_embeddings.weight[tokens] + bert.position_embeddings.weight[:7] + bert.segment_embeddings.weight[0]
        hidden = normalised(hidden, bert.norm)
        for layer in bert.encoder.layers:
            hidden = normalised(hidden + attended(hidden, layer.self_attn), layer.norm1)
            inner = gelu(hidden @ layer.linear1.weight.T + layer.linear1.bias)
            hidden = normalised(hidden + inner @ layer.linear2.weight.T + layer.linear2.bias, layer.norm2)
        pooled = torch.tanh(hidden[:, 0] @ bert.pooler.weight.T + bert.pooler.bias)
        expected = pooled @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(tokens), expected)
    torch.testing.assert_close(model.eval()(tokens), expected)


def test_bert_begins_with_its_own_spread() -> None:
    """Every matrix is drawn again with a deviation of 0.02, the layers' not alike, and logits begin near zero."""
    model: Any = build_model("bert_base", {**TINY_BERT, "hidden": 96, "heads": 3}, "float32", 0)
    spreads = [float(parameter.detach().std()) for parameter in model.parameters() if parameter.dim() == 2 and parameter.numel() > 1500]
    assert len(spreads) == 1 + 2 * 4 + 2  # words; per layer projections in and out, and two of the feed-forward; positions, pooler
    np.testing.assert_allclose(spreads, 0.02, rtol=0.1)
    first, second = model.bert.encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("resnet50", marks=pytest.mark.slow), "bert_base"])
def test_every_parameter_gets_a_gradient_and_training_lowers_the_loss(name: str, tmp_path: Path) -> None:
    """On synthetic data the loss falls well below that of guessing."""
    options = {"classes": 2} if name == "resnet50" else {"classes": 2, "positions": 16}
    sizes = {"samples": 80, "image_size": 40} if name == "resnet50" else {"samples": 200, "length": 4}
    workload = Workload(model=name, model_options={**TINY[name], **options}, data="synthetic", data_options=sizes)  # type: ignore[arg-type]  # an invariant dict
    prepare(workload, 0, tmp_path)
    model = build_model(name, workload.model_options, "float32", 0)
    batches = Batches(tmp_path, _sampler(tmp_path, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for position in range(40 if name == "resnet50" else 150):
        inputs, labels = batches.batch(position)
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-5:]) < 0.6 * math.log(2)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_models_can_be_profiled(name: str) -> None:
    """Every gradient of a step is seen when it is final, the last layer's first, and every layer has its time."""
    options = {} if name == "resnet50" else TINY_BERT
    model = build_model(name, options, "float32", 0)
    inputs = torch.zeros(2, 3, 64, 64) if name == "resnet50" else torch.zeros(2, 8, dtype=torch.int64)
    clock = LayerClock(model)
    clock.attach()
    for _ in range(2):
        cross_entropy(model(inputs), torch.tensor([0, 1])).backward()
        model.zero_grad()
        clock.keep()
    clock.detach()
    times = clock.times()
    ready = dict(zip([gradient for gradient, _, _ in times.gradients], times.ready[1], strict=True))
    assert sorted(ready) == sorted(parameter for parameter, _ in model.named_parameters())
    first, last = ("conv1.weight", "fc.weight") if name == "resnet50" else ("bert.word_embeddings.weight", "classifier.weight")
    assert ready[first] is not None
    assert ready[last] is not None
    assert ready[last] < ready[first]
    never_called = {f"bert.encoder.layers.{index}.self_attn.out_proj" for index in range(2)}  # attention applies its weights itself
    assert all(time_ns > 0 for layer, time_ns in zip(times.layers, times.forward[1], strict=True) if layer not in never_called)


def test_a_text_is_its_bytes_with_one_masked(tmp_path: Path) -> None:
    """Unmasked, all samples are CPython's topics cut into pieces, each once; masks stand anywhere in a piece."""
    options = {"vocab": 257, "classes": 256}
    workload = Workload(model="bert_base", model_options=options, data="pydocs", data_options={"length": 64, "held_out": 10**6})  # type: ignore[arg-type]  # an invariant dict
    check_model(workload)
    prepare(workload, 0, tmp_path)
    text = Path(pydoc_data.topics.__file__).read_bytes()
    samples, labels = (np.concatenate([np.load(tmp_path / f"{kind}_{part}.npy") for part in ("train", "eval")]) for kind in "xy")
    masked = samples == 256
    assert (masked.sum(axis=1) == 1).all()
    pieces = np.where(masked, labels[:, None], samples).astype(np.uint8)
    num_pieces = len(text) // 64
    assert sorted(bytes(piece) for piece in pieces) == sorted(text[64 * index : 64 * index + 64] for index in range(num_pieces))
    assert len(held_out(tmp_path)[1]) == -(-num_pieces // 5)
    assert np.bincount(masked.argmax(axis=1), minlength=64).min() > 0.5 * num_pieces / 64


def test_the_held_out_split_can_be_limited(tmp_path: Path) -> None:
    """``held_out`` leaves the training split as it is."""
    options = {"vocab": 257, "classes": 256}
    for number in (7, 10**6):
        workload = Workload(model="bert_base", model_options=options, data="pydocs", data_options={"held_out": number})  # type: ignore[arg-type]  # an invariant dict
        prepare(workload, 0, tmp_path / str(number))
    assert len(held_out(tmp_path / "7")[1]) == 7
    assert num_training_samples(tmp_path / "7") == num_training_samples(tmp_path / str(10**6))


def test_a_text_may_be_a_file(tmp_path: Path) -> None:
    """``text:FILE`` reads that file; one that is missing or too short is an error with a hint."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))

    def workload(name: Path, length: int) -> Workload:
        options = {"vocab": 257, "classes": 256}
        return Workload(model="bert_base", model_options=options, data=f"text:{name}", data_options={"length": length})  # type: ignore[arg-type]  # an invariant dict

    prepare(workload(path, 4), 0, tmp_path / "data")
    reader = open_batches(workload(path, 4), tmp_path / "data", _sampler(tmp_path / "data"))
    inputs, labels = reader.batch(0)
    reader.close()
    whole = torch.where(inputs == 256, labels[:, None], inputs)
    assert torch.equal(whole - whole[:, :1], torch.arange(4).expand(8, 4))
    for name, length, match in ((tmp_path / "nothing", 4, "cannot be read"), (path, 300, "no 300 bytes"), (path, 100, "too few samples")):
        with pytest.raises(ConfigError, match=match) as caught:
            prepare(workload(name, length), 0, tmp_path / "other")
        assert caught.value.hint


def test_synthetic_images_are_normalised_bytes(tmp_path: Path) -> None:
    """A reader gives (pixel / 255 - mean) / deviation of each channel, in the workload's type."""
    workload = Workload(
        model="resnet50", model_options={"classes": 5}, dtype="float64", data="synthetic", data_options={"samples": 40, "image_size": 16}
    )
    prepare(workload, 0, tmp_path)
    raw = np.load(tmp_path / "x_train.npy")
    assert raw.shape == (32, 3, 16, 16)
    inputs, _ = Batches(tmp_path, _sampler(tmp_path)).batch(0)
    chosen = _sampler(tmp_path).indices(0)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (raw[chosen].transpose(0, 2, 3, 1) / 255 - mean) / deviation
    np.testing.assert_allclose(inputs.numpy().transpose(0, 2, 3, 1), expected, atol=1e-14)
    assert held_out(tmp_path)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "resnet50"}, r"workload\.data: is not what resnet50 is fed with"),
        ({"data": "imagenet:images"}, r"is not what digits_mlp is fed with.*\n.*digits or synthetic"),
        ({"data": "cifar"}, "is not what digits_mlp is fed with"),
        ({"model": "word2vec", "data": "pydocs", "data_options": {"subsample": 0}}, r"subsample: must be a number above 0"),
        ({"model": "word2vec", "data": "pydocs", "data_options": {"length": 3}}, r"data_options\.length: not an option.*\n.*min_count"),
        ({"model": "wide_deep", "data": "synthetic", "model_options": {"rows": 2**24 + 1}}, r"rows: must be .*at most 16777216"),
        ({"model": "mlp"}, r"model_options\.features: must be at least 64"),
        ({"model": "resnet18"}, "not a model that can be executed"),
        ({"data": "synthetic", "data_options": {"samples": 0}}, "whole number of at least 1"),
        ({"data": "synthetic", "data_options": {"samples": 1.5}}, "whole number of at least 1"),
        ({"model": "llama", "data": "synthetic", "model_options": {"tied": 1}}, "true or false"),
        (
            {"model": "resnet50", "data": "synthetic", "batch_size": 1, "data_options": {"image_size": 32}},
            r"image_size: must be at least 33",
        ),
        ({"model": "bert_base", "data": "synthetic", "model_options": {"heads": 7}}, "does not divide hidden"),
        ({"model": "bert_base", "data": "synthetic", "model_options": {"positions": 64}}, r"data_options\.length: must be .*at most 64"),
        ({"model": "bert_base", "data": "pydocs"}, r"model_options\.classes: must be at least 256"),
        (
            {"model": "bert_base", "data": "pydocs", "model_options": {"classes": 256, "vocab": 256}},
            r"options\.vocab: must be at least 257",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_hint(changes: dict[str, Any], match: str) -> None:
    """Model, data and options are checked against each other before anything starts."""
    with pytest.raises(ConfigError, match=match) as caught:
        check_model(Workload(**changes))
    assert caught.value.hint


@pytest.mark.parametrize(("model", "inputs"), list(INPUTS.items()))
def test_synthetic_data_feed_every_model(model: str, inputs: str, tmp_path: Path) -> None:
    """What the reader gives goes through the model, and the labels are its classes."""
    sizes = {"images": {"samples": 20, "image_size": 40}, "tokens": {"samples": 40, "length": 7}}.get(inputs, {"samples": 40})
    workload = Workload(model=model, model_options=SMALL.get(model, {}), data="synthetic", data_options=sizes)  # type: ignore[arg-type]  # an invariant dict
    check_model(workload)
    prepare(workload, 0, tmp_path)
    batch, labels = open_batches(workload, tmp_path, _sampler(tmp_path)).batch(0)
    output = {"wide_deep": (8,), "word2vec": (8, 6), "gpt": (8, 6), "llama": (8, 6)}.get(model, (8, 10))
    assert build_model(model, workload.model_options, "float32", 0)(batch).shape == output
    assert labels.dtype == torch.int64
    assert 0 <= int(labels.min()) <= int(labels.max()) < 10


def test_the_page_of_models_says_what_feeds_them_and_their_defaults() -> None:
    """Every model has a row in docs/models.md, with its options as it takes them and all data that it accepts."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for line in page.splitlines() if len(cells := line.split("|")) == 7}
    for name, model in MODELS.items():
        _, _, _, options, _, fed, _ = rows[name]
        spelled = [f"`{option.name}` {str(option.default).lower()}" for option in signature(model).parameters.values()]
        assert [part.strip() for part in options.split(",")] == spelled
        accepted = []
        for data in ("digits", "synthetic", "pydocs", "text:FILE", "imagenet:DIR"):
            try:
                check_model(Workload(model=name, data=data))
            except ConfigError as error:
                if "is fed with" in error.what:
                    continue
            accepted.append(data)
        assert sorted(part for part in fed.split("`")[1::2] if " " not in part) == sorted(accepted)
