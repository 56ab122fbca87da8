"""Several models in one job: their checkpoints, exports and loss scales."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from processes import Arrays, run_ranks, values_of
from several_rank import CASES, SAVED, STEPS

RANK = Path(__file__).with_name("several_rank.py")
KEYS = [*(f"step {number}" for number in range(STEPS - SAVED)), "end", "scales"]
LOOKED_AT = ("synchronous", "synchronous, one optimizer", "Local SGD", "DiLoCo", "loss scales")
EVERY = [pytest.param(name, marks=() if name in LOOKED_AT else pytest.mark.slow) for name in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the checkpoints."""
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> str:
    """The cases that tests look at."""
    return json.dumps(sorted({*LOOKED_AT, *values_of(request, "case")}))


@pytest.fixture(scope="module")
def trained(folder: Path, names: str) -> list[Arrays]:
    """Each case, uninterrupted, without saves and with them."""
    return run_ranks(RANK, 2, "train", str(folder), names)


@pytest.fixture(scope="module")
def resumed(folder: Path, names: str, trained: list[Arrays]) -> list[Arrays]:
    """Each case, from its save on, in other processes."""
    assert trained
    return run_ranks(RANK, 2, "resume", str(folder), names)


@pytest.mark.parametrize("case", EVERY)
def test_a_resumed_gan_is_the_uninterrupted_one(trained: list[Arrays], resumed: list[Arrays], case: str) -> None:
    """Both models, their optimizers and loss scales are the same bits after every later step, in the middle of rounds of both, too."""
    for whole, again in zip(trained, resumed, strict=True):
        for key in KEYS:
            np.testing.assert_array_equal(again[f"{case}/{key}"], whole[f"{case}/{key}"], err_msg=key)
            np.testing.assert_array_equal(whole[f"saved {case}/{key}"], whole[f"{case}/{key}"], err_msg=f"saved, {key}")


def test_the_cases_are_what_they_say(trained: list[Arrays]) -> None:
    """Ranks differ at a save under local steps and agree otherwise; the models' scales went different ways."""
    first, second = trained
    at_save = f"step {STEPS - SAVED}"
    for case in ("Local SGD", "DiLoCo"):
        assert not np.array_equal(first[f"{case}/{at_save}"][:36], second[f"{case}/{at_save}"][:36])
    np.testing.assert_array_equal(first[f"synchronous/{at_save}"][:36], second[f"synchronous/{at_save}"][:36])
    generator, discriminator = first["loss scales/scales"]
    assert generator != discriminator


def test_what_does_not_fit_is_refused(resumed: list[Arrays]) -> None:
    """Another number or order of models, other optimizers; nothing is loaded then."""
    for found in resumed:
        assert "another number of models (got saved 2, here 1)" in _told(found["one model"])
        assert "another number of models (got saved 2, here 3)" in _told(found["three models"])
        assert "model 0: was saved from another model" in _told(found["in another order"])
        assert "was saved with other optimizers (got saved AdamW, here AdamW, SGD)" in _told(found["other optimizers"])
        assert not found["changed"]


def test_one_of_several_models_is_chosen(resumed: list[Arrays]) -> None:
    """``model=`` chooses whose tensors a predicate loads, and which is exported; an error lists the models."""
    listed = "takes one of several models (got 0: Sequential, 1: Sequential)"
    for found in resumed:
        assert _told(found["some of which"]).startswith(f"fleet.load_persistables: {listed}")
        assert _told(found["export of which"]).startswith(f"fleet.save_inference_model: {listed}")
        assert "is given a model that is not distributed" in _told(found["another model"])
        assert "chooses a model for predicate=..." in _told(found["all of one"])
        assert found["loaded"].tolist() == ["0.weight", "0.bias"]
        assert found["off"] == 0.0
        assert not found["others changed"]
        assert found["exported"] < 1e-6


@pytest.mark.parametrize("name", ["loss scales", pytest.param("loss scales, one optimizer", marks=pytest.mark.slow)])
def test_scales_of_several_models_are_those_of_several_scalers(tmp_path: Path, name: str) -> None:
    """An overflow of one model on one rank leaves out this model's update on both, and lowers its scale alone, as under DDP."""
    for found in run_ranks(RANK, 2, "scaled", str(tmp_path), json.dumps([name])):
        np.testing.assert_array_equal(found["scales"], found["torch's"])
        assert found["scales"][0] != found["scales"][1]
        np.testing.assert_array_equal(found["off"], np.zeros(STEPS))
        assert found["moved"] > 0.01


def test_an_overflow_leaves_out_its_model_where_one_optimizer_holds_two(tmp_path: Path) -> None:
    """One loss passes through both; the other model is updated, on both ranks."""
    for found in run_ranks(RANK, 2, "joint", str(tmp_path), "[]"):
        np.testing.assert_array_equal(found["fleet"], found["by hand"])


def _told(message: np.ndarray) -> str:
    return str(message)
