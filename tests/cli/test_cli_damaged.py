"""A fixed sample of the campaigns in reports/damaged_files: no damaged file is believed, no senseless value leaves a traceback."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPORTS = Path(__file__).resolve().parents[2] / "reports" / "damaged_files"


def _campaign(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(f"damaged_files_{name}", REPORTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def damage() -> Iterator[ModuleType]:
    """The campaign of damaged files."""
    yield from _campaign("damage")


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    """The campaign of senseless values."""
    yield from _campaign("hostile")


@pytest.mark.slow
def test_no_damaged_file_is_believed(damage: ModuleType, tmp_path: Path) -> None:
    """Every kind of file, cut in two places and with two bits flipped: refused, or read as it was. Without a digest: no traceback."""
    seen = set()
    for case in damage.cases(tmp_path):
        whole, right = case.file.read_bytes(), case.read()
        for kind, place, damaged in damage.damages(whole, flips=2, every=len(whole) // 2 + 1):
            case.file.write_bytes(damaged)
            ended, said = damage.outcome(case, right)
            allowed = (*damage.GOOD, "believed") if case.foreign else damage.GOOD
            assert ended in allowed, f"{case.name}: {kind} at {place}: {ended}: {said}"
            seen.add(ended)
        case.file.write_bytes(whole)
        assert case.read() == right
    assert {"refused", "begun anew"} <= seen


@pytest.mark.slow
def test_no_senseless_value_leaves_a_traceback(hostile: ModuleType, tmp_path: Path) -> None:
    """Every 100th pair of a key and a value: exit code 0, 2 or 3, in less than 20 s, and a hint."""
    pairs = hostile.pairs()[::100]
    assert len(pairs) > 100
    ends = set()
    for kind, key, number in pairs:
        ended, said = hostile.one(kind, key, number, tmp_path)
        assert ended in hostile.GOOD, f"{key} = {hostile.VALUES[number][:40]}: {ended}: {said}"
        ends.add(ended)
    assert {"0", "2"} <= ends


@pytest.mark.parametrize(
    ("key", "value", "phrase"),
    [
        ("workload.steps", "1000000000", "5,000,000 at most"),
        ("workload.steps", str(2**64), "64 bits"),
        ("run.seed", "0x" + "f" * 5000, "64 bits"),
        ("cluster.nodes", str(10**9), "200,000 at most"),
        ("name", '"' + "x" * 300 + '"', "at most 128 bytes"),
        ("workload.profile", '"a\\u0000b"', "NUL"),
        ("workload.profile", '"/dev/zero"', "is a device"),
        ("workload.lr", "9" * 5000, "digits"),
        ("workload.layers", "[" * 5000 + "]" * 5000, "not TOML"),
    ],
    ids=lambda text: text[:24],
)
def test_what_cannot_be_meant_is_refused(
    key: str, value: str, phrase: str, command: Callable, experiment: Callable[..., Path], tmp_path: Path
) -> None:
    """Numbers that nothing counts, names that no file system takes, files that do not end, and a billion steps: exit code 2, at once."""
    text = experiment().read_text()
    table, _, name = key.rpartition(".")
    lines = [line for line in text.splitlines() if not line.startswith(f"{name} = ")]
    place = lines.index(f"[{table}]") + 1 if table else 1
    path = tmp_path / "e.toml"
    path.write_text("\n".join([*lines[:place], f"{name} = {value}", *lines[place:]]))
    ended = command("sim", path, "--out", tmp_path / "runs")
    assert ended.code == 2, ended.err
    assert phrase in ended.err
    assert "HINT: " in ended.err
    assert len(ended.err) < 3000
    assert not (tmp_path / "runs").exists()
