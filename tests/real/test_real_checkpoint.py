"""Checkpoint: what lies on disk is whole, is what was saved, and is refused in words where it is not."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from alone import AloneMeeting, Training
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

from fleetbench.digests import sealed_json
from fleetbench.errors import ConfigError, EnvironmentLacks
from real.checkpoints import checkpoint
from real.checkpoints.checkpoint import MANIFEST, Draft, last_save, open_save, read_part
from real.checkpoints.saving import Loaded, load, load_some, save

ALONE = AloneMeeting()


def mlp(width: int = 4, **more: nn.Module) -> nn.Module:
    """A model with a batch norm; ``more`` replaces layers by name."""
    layers = {"first": nn.Linear(3, width), "norm": nn.BatchNorm1d(width), "last": nn.Linear(width, 2)} | more
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def trained(model: nn.Module, path: Path, steps: int = 3, **fields: object) -> dict[str, torch.Tensor]:
    """Train some steps, save, and return the model's tensors."""
    with Training(model, **fields) as training:
        for _ in range(steps):
            training.step(torch.randn(5, 3))
        save([training.engine], ALONE, path, extra={"epoch": 2})
    return {name: value.clone() for name, value in model.state_dict().items()}


def go_on(model: nn.Module, path: Path, **options: Any) -> Loaded:
    """Load into another training."""
    predicate, anew = options.pop("predicate", None), options.pop("resynchronize", False)
    with Training(model, **options) as training:
        if predicate is not None:
            return load_some(training.engine, ALONE, path, predicate)
        return load([training.engine], ALONE, path, resynchronize=anew)


def through(value: object, folder: Path) -> Any:
    """What a save of a value as ``extra`` gives back."""
    with Training(mlp()) as training:
        save([training.engine], ALONE, folder, extra=value)
    return go_on(mlp(), folder).extra


def test_torch_reads_the_model(tmp_path: Path) -> None:
    """A plain loop takes up the model's file by its own names."""
    expected = trained(mlp(), tmp_path)
    (file,) = tmp_path.glob("save-*/model.pt")
    model = mlp()
    model.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


class TestPlain:
    """What schedulers and optimizers call their state is plain data with tensors in it."""

    VALUE: ClassVar[dict[str, object]] = {
        "number": 3,
        "float": 0.1 + 0.2,
        "infinite": [math.inf, -math.inf],
        "pair": (1, (2.5, None)),
        "milestones": Counter({30: 1, 60: 2}),
        "by number": {0: "a", 1: {"momentum": torch.arange(3.0)}},
        "$": "a key of ours",
        "flag": True,
        "": [],
    }

    def test_values_come_back_with_their_types(self, tmp_path: Path) -> None:
        """Tuples, counters, keys that are numbers, floats to the last bit, tensors."""
        found = through(self.VALUE, tmp_path)
        assert list(found) == list(self.VALUE)
        assert found.pop("by number")[1]["momentum"].tolist() == [0.0, 1.0, 2.0]
        assert found == {name: value for name, value in self.VALUE.items() if name != "by number"}
        assert type(found["milestones"]) is Counter
        assert type(found["pair"]) is type(found["pair"][1]) is tuple

    def test_random_numbers_of_others_go_on(self, tmp_path: Path) -> None:
        """What numpy's old and new generators and Python's own call their state, one of them with an array in it."""
        old, new = np.random.RandomState(3), np.random.default_rng(3)
        own, again = random.Random(3), random.Random(4)  # noqa: S311  # nothing is secret
        found = through([old.get_state(), new.bit_generator.state, own.getstate()], tmp_path)
        expected = old.standard_normal(700), new.standard_normal(700), own.random()
        other, another = np.random.RandomState(4), np.random.default_rng(4)
        other.set_state(found[0])
        another.bit_generator.state = found[1]
        again.setstate(found[2])
        assert np.array_equal(other.standard_normal(700), expected[0])
        assert np.array_equal(another.standard_normal(700), expected[1])
        assert again.random() == expected[2]

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ({"a": [object()]}, "object"),
            (lambda: 0, "lambda"),
            (np.array([None]), "ObjectDType"),
        ],
    )
    def test_anything_else_is_refused_by_its_class(self, value: object, said: str, tmp_path: Path) -> None:
        """What is no plain data would need code to be read; no save is in force then."""
        with pytest.raises(ConfigError, match=r"rank-00000\.pt: cannot be saved as plain data") as caught:
            through(value, tmp_path)
        assert said in str(caught.value.value)
        assert last_save(tmp_path) == 0

    def test_a_file_that_would_execute_code_is_refused(self, tmp_path: Path) -> None:
        """By the name of what it would call."""
        torch.save({"call": os.getcwd}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"a\.pt: is damaged, or of another kind: it holds a posix\.getcwd"):
            read_part(tmp_path / "a.pt")


class TestOptimizer:
    """An optimizer's state keeps its types."""

    def test_nested_state_keeps_its_types_bit_by_bit(self, tmp_path: Path) -> None:
        """Tensors in lists, tuples and dictionaries, text, which torch makes a generator's name of, and counters."""
        model = nn.Linear(3, 2).bfloat16()
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
        for parameter in model.parameters():
            values = [torch.randn(parameter.shape) for _ in range(3)] + [torch.arange(6, dtype=torch.int8), torch.randn(2).bfloat16()]
            first.state[parameter] = {
                "history": values,
                "deep": {"pair": (values[0].double(), [values[1]], 3), "step": torch.tensor(4.0)},
                "name": "quantised",
                "seen": Counter(a=2),
                "none": None,
            }
        with Training(model, first) as training:
            save([training.engine], ALONE, tmp_path, extra=None)
        go_on(model, tmp_path, optimizer=second)

        def told(value: object) -> object:
            if isinstance(value, torch.Tensor):
                return value.dtype, value.tolist()
            if isinstance(value, list | tuple):
                return type(value), [told(each) for each in value]
            return (type(value), {key: told(each) for key, each in value.items()}) if isinstance(value, dict) else value

        for parameter in model.parameters():
            assert told(second.state[parameter]) == told(first.state[parameter])


class TestDraft:
    """A save is in force as a whole, or not at all."""

    PARTS = ("a.pt", "b.pt")

    def _save(self, root: Path, number: int) -> None:
        draft = Draft(root, number)
        draft.begin()
        written = {name: draft.write(name, {"x": torch.full((1000,), float(number))}) for name in self.PARTS}
        draft.commit({"number": number}, written)
        draft.sweep()

    def _values(self, root: Path) -> set[float]:
        found = open_save(root, last_save(root))
        values = {float(found.manifest["number"])}
        for name in self.PARTS:
            values |= set(found.read(name)["x"].tolist())
        return values

    def test_a_save_replaces_the_one_before(self, tmp_path: Path) -> None:
        """Nothing of the old one, or of one that was begun, is left."""
        self._save(tmp_path, 1)
        (tmp_path / "save-00000007").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        self._save(tmp_path, 2)
        assert self._values(tmp_path) == {2.0}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "save-00000002"]

    @pytest.mark.parametrize(("function", "least"), [("fsync", 5), ("replace", 1), ("rmtree", 1)])
    def test_a_killed_save_leaves_the_old_or_the_new(self, tmp_path: Path, function: str, least: int) -> None:
        """SIGKILL before each write to the disk, before the manifest is there, and before the old save goes: one of them is whole."""
        self._save(tmp_path, 1)
        killed = 0
        while True:
            before = last_save(tmp_path)
            pid = os.fork()
            if pid == 0:
                self._be_killed(tmp_path, function, killed + 1)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSIGNALED(status):
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert self._values(tmp_path) in ({float(before)}, {float(before + 1)})
            killed += 1
        assert killed >= least
        assert self._values(tmp_path) == {float(before + 1)}
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"save-{before + 1:08d}"], "the next save has cleared up"

    def _be_killed(self, root: Path, function: str, strike: int) -> None:
        """In a child: save, and kill oneself at the call of this number; never returns."""
        count = 0

        def struck(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                if count == strike:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **named)

            return run

        try:
            owner: Any = {"fsync": os, "replace": Path, "rmtree": checkpoint.shutil}[function]
            setattr(owner, function, struck(getattr(owner, function)))
            self._save(root, last_save(root) + 1)
        finally:
            os._exit(0)

    def test_a_part_that_another_trainer_put_elsewhere_is_missed(self, tmp_path: Path) -> None:
        """Without a file system in common no checkpoint comes into force, and the hint says what to do."""
        draft = Draft(tmp_path, 1)
        draft.begin()
        there = Draft(tmp_path / "of another host", 1).write("b.pt", {"x": torch.ones(3)})
        with pytest.raises(EnvironmentLacks, match="it is not here") as caught:
            draft.commit({}, {"b.pt": there})
        assert "share" in str(caught.value.hint)
        assert last_save(tmp_path) == 0
        assert not draft.folder.exists()


class TestTampering:
    """What is not what was saved is refused, and says which file."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """A checkpoint."""
        trained(mlp(), tmp_path)
        return tmp_path

    def _refused(self, path: Path, match: str) -> ConfigError:
        model = mlp()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match=match) as caught:
            go_on(model, path)
        assert caught.value.hint
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "nothing was loaded"
        return caught.value

    def test_untouched_it_loads(self, saved: Path) -> None:
        """The faults below are faults."""
        assert go_on(mlp(), saved).step == 3

    @pytest.mark.parametrize("name", ["model.pt", "training.pt"])
    @pytest.mark.parametrize("fault", ["bit", "cut", "longer", "gone"])
    def test_a_damaged_part(self, saved: Path, name: str, fault: str) -> None:
        """One bit, the end, more at the end, the whole file."""
        (path,) = saved.glob(f"save-*/{name}")
        data = bytearray(path.read_bytes())
        if fault == "gone":
            path.unlink()
        else:
            data[-1] ^= fault == "bit"
            path.write_bytes(bytes(data[:-1] if fault == "cut" else data + b"x" * (fault == "longer")))
        match = "cannot be read" if fault == "gone" else "its digest differs"
        assert name in str(self._refused(saved, match).where)

    def test_a_manifest_that_was_edited(self, saved: Path) -> None:
        """Another number of trainers in the text is no other checkpoint."""
        (path,) = saved.glob(f"save-*/{MANIFEST}")
        path.write_text(path.read_text().replace('"trainers": 1', '"trainers": 2'))
        self._refused(saved, "its digest differs")

    @pytest.mark.parametrize("change", [{"files": {}}, {"files": []}, {"trainers": None}, {"schema": 2}])
    def test_a_manifest_of_another_making(self, saved: Path, change: dict[str, object]) -> None:
        """Consistent in its digest and not in its content: still an error in words, never a traceback."""
        (path,) = saved.glob(f"save-*/{MANIFEST}")
        manifest = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"} | change
        path.write_text(sealed_json(manifest))
        self._refused(saved, "this version|of another kind|no such part|another number of trainers")

    @pytest.mark.parametrize("text", ["", "[]", "{}"])
    def test_a_strangers_manifest(self, saved: Path, text: str) -> None:
        """It is no text of ours, or says nothing of a checkpoint."""
        (path,) = saved.glob(f"save-*/{MANIFEST}")
        path.write_text(text)
        self._refused(saved, "of another kind|is not a manifest of this version")

    def test_a_folder_without_a_checkpoint(self, tmp_path: Path) -> None:
        """It says what writes one."""
        assert "save_persistables" in str(self._refused(tmp_path / "nowhere", "there is no checkpoint").hint)


class TestMisfits:
    """A checkpoint is loaded into what it was saved from, and nothing else."""

    @pytest.mark.parametrize(
        ("model", "match"),
        [
            (lambda: mlp(5), r"first.weight has another shape or type \(got saved \[4, 3\] of float32, here \[5, 3\]"),
            (lambda: mlp(head=nn.Linear(2, 2)), r"another model \(got not saved: head.bias, head.weight"),
            (lambda: mlp(norm=nn.Identity()), "not in the model: norm.bias"),
        ],
        ids=["shape", "more", "less"],
    )
    def test_another_model(self, tmp_path: Path, model: Callable[[], nn.Module], match: str) -> None:
        """Names, shapes and types are compared, and named."""
        trained(mlp(), tmp_path)
        with pytest.raises(ConfigError, match=match):
            go_on(model(), tmp_path)

    def test_another_part_of_it_is_trained(self, tmp_path: Path) -> None:
        """A layer that was trained and is frozen now makes other buckets."""
        trained(mlp(), tmp_path)
        model = mlp()
        model.get_submodule("first").requires_grad_(False)  # torch's signature
        with pytest.raises(ConfigError, match=r"other parameters were trained.*first\.bias, first\.weight"):
            go_on(model, tmp_path)

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda model: torch.optim.Adam(model.parameters()), "saved SGD, here Adam"),
            (
                lambda model: torch.optim.SGD(list(model.parameters())[::-1], lr=0.1),
                r"group 0 holds other.*'first.weight', here 'last.bias'",
            ),
        ],
        ids=["class", "order"],
    )
    def test_another_optimizer(self, tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], match: str) -> None:
        """Its class, and the parameters of each group in their order."""
        trained(mlp(), tmp_path)
        model = mlp()
        with pytest.raises(ConfigError, match=match):
            go_on(model, tmp_path, optimizer=make(model))

    def test_another_strategy(self, tmp_path: Path) -> None:
        """The fields that differ are named with both values; the hint says how to begin again."""
        trained(mlp(), tmp_path, fuse_grad_size_in_MB=8)
        with pytest.raises(ConfigError, match=r"fuse_grad_size_in_MB: saved 8.0, here 32.0") as caught:
            go_on(mlp(), tmp_path)
        assert "resynchronize=True" in str(caught.value.hint)
        assert go_on(mlp(), tmp_path, resynchronize=True).step == 3

    def test_a_model_that_keeps_more_than_tensors(self, tmp_path: Path) -> None:
        """Extra state of a module is refused by name when it is saved, instead of being lost."""

        class Counting(nn.Linear):
            def get_extra_state(self) -> dict[str, int]:
                return {"calls": 3}

        with pytest.raises(ConfigError, match=r"first\._extra_state: holds state that is neither"):
            trained(mlp(first=Counting(3, 4)), tmp_path)

    def test_in_the_middle_of_a_step(self, tmp_path: Path) -> None:
        """Between a backward and its update there is nothing that one could go on from."""
        with Training(mlp()) as training:
            training.model(torch.randn(5, 3)).sum().backward()
            with pytest.raises(ConfigError, match="in the middle of a step"):
                save([training.engine], ALONE, tmp_path, extra=None)

    def test_a_damaged_disk_leaves_the_training_alone(self, tmp_path: Path) -> None:
        """A folder that takes no file is the environment's fault; training goes on."""
        (tmp_path / "file").write_text("")
        with Training(mlp()) as training:
            training.step(torch.randn(5, 3))
            with pytest.raises(EnvironmentLacks, match="cannot be written"):
                save([training.engine], ALONE, tmp_path / "file" / "below", extra=None)
            training.step(torch.randn(5, 3))


class TestSome:
    """A predicate takes some of a model: a trained trunk under a new head."""

    def test_a_trunk_under_a_new_head(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What is wanted is loaded, the rest stays; all three lists are returned, and printed."""
        saved = trained(mlp(), tmp_path)
        model = mlp(last=nn.Linear(4, 7), more=nn.Linear(7, 7))
        head = model.get_submodule("last")
        before = [parameter.clone() for parameter in head.parameters()]
        loaded = go_on(model, tmp_path, predicate=lambda name: not name.startswith("last"))
        assert set(loaded.loaded) == {name for name in saved if not name.startswith("last")}
        assert set(loaded.missing) == {"last.weight", "last.bias", "more.weight", "more.bias"}
        assert set(loaded.left_over) == {"last.weight", "last.bias"}
        assert all(torch.equal(model.state_dict()[name], saved[name]) for name in loaded.loaded)
        assert all(torch.equal(one, other) for one, other in zip(before, head.parameters(), strict=True))
        text = capsys.readouterr().err
        assert "loaded 7 of the model's 11 tensors" in text
        assert "left over: last.weight, last.bias" in text

    @pytest.mark.parametrize("suffix", ["safetensors", "pt"])
    def test_any_file_of_weights_will_do(self, tmp_path: Path, suffix: str) -> None:
        """A file of safetensors, or of torch.save."""
        tensors = {"first.weight": torch.ones(4, 3), "theirs": torch.zeros(2)}
        (save_file if suffix == "safetensors" else torch.save)(tensors, tmp_path / f"trunk.{suffix}")
        model = mlp()
        loaded = go_on(model, tmp_path / f"trunk.{suffix}", predicate=lambda _: True)
        assert loaded.loaded == ("first.weight",)
        assert loaded.left_over == ("theirs",)
        assert torch.equal(model.state_dict()["first.weight"], torch.ones(4, 3))

    def test_wanting_nothing_that_is_there_is_an_error(self, tmp_path: Path) -> None:
        """Names of both sides are shown."""
        trained(mlp(), tmp_path)
        with pytest.raises(ConfigError, match="has no tensor that is both wanted"):
            go_on(mlp(), tmp_path, predicate=lambda name: name.startswith("trunk."))

    def test_a_file_that_is_no_safetensors(self, tmp_path: Path) -> None:
        """A pickle of that name is not even looked into."""
        torch.save({"first.weight": torch.ones(4, 3)}, tmp_path / "trunk.safetensors")
        with pytest.raises(ConfigError, match=r"trunk\.safetensors: is damaged, or of another kind"):
            go_on(mlp(), tmp_path / "trunk.safetensors", predicate=lambda _: True)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    """A shared parameter has one name in the file, and is tied again after a load."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    first, second = tied(), tied()
    with Training(first) as training:
        training.step(torch.randn(5, 3))
        save([training.engine], ALONE, tmp_path, extra=None)
    go_on(second, tmp_path)
    assert torch.equal(second[1].weight, first[0].weight)
    assert second[1].weight is second[0].weight


def test_a_model_that_is_pruned_in_between_is_not_saved_under_other_names(tmp_path: Path) -> None:
    """An average would be saved beside the parameter that it belongs to."""
    model = mlp()
    with Training(model, localsgd=True) as training:
        training.step(torch.randn(5, 3))
        prune.l1_unstructured(model.first, "weight", 0.5)  # type: ignore[arg-type]  # it is a Linear
        training.step(torch.randn(5, 3))
        with pytest.raises(ConfigError, match=r"fleet.save_persistables: parameter first.weight.*has another name"):
            save([training.engine], ALONE, tmp_path, extra=None)
