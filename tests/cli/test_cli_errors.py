"""Bad input: a clear message, a hint, the right exit code, no traceback, nothing stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleetbench.cli import sim

BAD = {
    "unknown key": (("--set", "workload.batchsize=64"), ("workload.batchsize", "unknown key", "Did you mean 'batch_size'?")),
    "unknown section": (("--set", "clutser.nodes=2"), ("clutser", "Did you mean 'cluster'?")),
    "wrong unit": (("--set", 'cluster.inter={ bandwidth = "25 GHz" }'), ("cluster.inter.bandwidth", "'25 GHz'", "Gbit/s")),
    "negative bandwidth": (("--set", 'cluster.inter={ bandwidth = "-1 Gbit/s" }'), ("bandwidth", "cannot be negative", "-1 Gbit/s")),
    "no unit": (("--set", "run.timeout=30"), ("run.timeout", "needs a unit")),
    "wrong type": (("--set", "workload.steps=many"), ("workload.steps", "whole number", "'many'")),
    "no value": (("--set", "workload.steps"), ("--set", "not an override")),
    "negative seed": (("--seed", "-1"), ("seed", "must be at least 0")),
    "not executed": (("--set", "strategy.auto=true"), ("strategy.auto", "does not execute")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name: str, command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """Exit code 2; the message names the key, the value and the way out."""
    arguments, phrases = BAD[name]
    ended = command("sim", experiment(), "--out", tmp_path / "runs", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    for phrase in phrases:
        assert phrase in ended.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command_name", ["sim", "real", "tune"])
def test_a_missing_file_is_named(command_name: str, command: Callable, tmp_path: Path) -> None:
    """The same for every command that takes a file."""
    ended = command(command_name, tmp_path / "absent.toml", "--out", tmp_path / "runs")
    assert ended.code == 2
    assert "absent.toml" in ended.err
    assert "HINT:" in ended.err


def test_what_is_not_toml_is_named(command: Callable, tmp_path: Path) -> None:
    """With the place where reading stopped."""
    path = tmp_path / "bad.toml"
    path.write_text("[workload\n")
    ended = command("sim", path)
    assert ended.code == 2
    assert "not TOML" in ended.err
    assert "line 1" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("simulate",),
        ("sim", "--steps", "3"),
        ("compare", "only-one"),
        ("compare", "a", "b", "--fail-over", "-1"),
        ("launch", "--nproc", "two", "x.py"),
    ],
)
def test_bad_usage_exits_2(arguments: tuple[str, ...], command: Callable) -> None:
    """An error as any other, whose hint is the help of what was asked."""
    ended = command(*arguments)
    asked = " ".join(("fleetbench", *arguments[: len(arguments) > 1 and arguments[0] != "sim"]))
    assert ended.code == 2
    assert ended.err.startswith(f"error: {asked}: ")
    script = "; a script's command follows `--`" if "unrecognized" in ended.err else ""
    assert script or arguments[:1] != ("sim",)
    assert ended.err.endswith(f"\nHINT: {asked} --help{script}\n")


@pytest.mark.parametrize("command_name", ["report", "compare"])
@pytest.mark.parametrize("kind", ["missing", "empty", "incomplete", "damaged"])
def test_a_folder_that_is_no_run_is_refused(
    kind: str, command_name: str, command: Callable, experiment: Callable[..., Path], tmp_path: Path
) -> None:
    """A folder that is missing, empty, was never finished, or lost a file, is named with exit code 2."""
    command("sim", experiment(), "--out", tmp_path / "runs")
    (run,) = (tmp_path / "runs").iterdir()
    whole = run
    folder = tmp_path / "folder"
    if kind == "empty":
        folder.mkdir()
    elif kind in ("incomplete", "damaged"):
        folder = run
        (folder / {"incomplete": "manifest.json", "damaged": "steps.parquet"}[kind]).unlink()
    ended = command(command_name, *([folder] if command_name == "report" else [folder, whole]))
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert folder.name in ended.err


def test_a_place_that_cannot_be_written_is_found_before_the_run(command: Callable, experiment: Callable[..., Path], tmp_path: Path) -> None:
    """--out below a file: exit code 3, as the environment lacks something."""
    (tmp_path / "file").write_text("")
    ended = command("sim", experiment(), "--out", tmp_path / "file" / "runs")
    assert ended.code == 3
    assert "--out" in ended.err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, command: Callable) -> None:
    """What is no error of the user's is not made to look like one."""

    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sim, "load_experiment", broken)
    with pytest.raises(ZeroDivisionError):
        command("sim")


def test_memory_that_ran_out_is_no_bug(command: Callable, experiment: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3 and a hint, as numpy raises it for a hundred million trainers, and as Python does, which says nothing more."""
    for said, shown in (("Unable to allocate 26.1 GiB", "too little memory: Unable to allocate 26.1 GiB\n"), ("", "too little memory\n")):

        def asks_too_much(*_: object, said: str = said, **__: object) -> None:
            raise MemoryError(said)

        monkeypatch.setattr("sim.run.simulate", asks_too_much)
        ended = command("sim", experiment())
        assert ended.code == 3
        assert shown in ended.err
        assert "HINT: fewer trainers" in ended.err


def test_a_profile_is_not_taken_for_a_run(command: Callable, tmp_path: Path) -> None:
    """It has a manifest as well; what to do with it is said."""
    folder = tmp_path / "box-profile-1"
    folder.mkdir()
    for name in ("manifest.json", "profile.toml", "measured.toml"):
        (folder / name).write_text("")
    ended = command("report", folder)
    assert ended.code == 2
    assert "holds no run" in ended.err
    assert "measured.toml" in ended.err
