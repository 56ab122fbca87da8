"""The quickstart, which the README's commands and the first notebook run: both by one profile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from notebook_cells import NOTEBOOKS, ROOT, run_notebook
from processes import forked_launches

from fleetbench.cli.main import main

SET_UP = ("make demo", "make test")
"""The README's two commands that make the environment these tests run in."""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is stored below ``runs/profiles``: the first of the tests measures it."""
    return tmp_path_factory.mktemp("profiles")


def _commands() -> list[str]:
    """Lines of the README's bash blocks, but those that set up."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *SET_UP))]


@pytest.fixture
def smaller(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The built-in experiment with 128 hidden units, not 768, which learn at a higher rate: commands and cells are shown here, no times.

    ``make test-all`` takes it as it stands.
    """
    if request.config.getoption("--slow") or request.config.getoption("--whole"):
        return
    text = (ROOT / "fleetbench" / "quickstart.toml").read_text(encoding="utf-8")
    assert "hidden = 768" in text
    assert "lr = 0.1\n" in text
    folder = tmp_path_factory.mktemp("built_in")
    smaller = text.replace("hidden = 768", "hidden = 128").replace("lr = 0.1\n", "lr = 0.3\n")
    (folder / "quickstart.toml").write_text(smaller, encoding="utf-8")
    monkeypatch.setattr("fleetbench.experiment.resources", SimpleNamespace(files=lambda _package: folder))


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("short_profiles", "smaller")
def test_the_readmes_commands_run(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the README, in its order, ends with exit code 0: bash reads it, and it runs here, where all is imported."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = tmp_path / "examples" / "train_digits.py"
    text = script.read_text(encoding="utf-8")
    assert "EPOCHS, BATCH = 10, 32" in text
    script.write_text(text.replace("EPOCHS, BATCH = 10, 32", "EPOCHS, BATCH = 2, 32"), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "profiles").symlink_to(profiles)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    commands = _commands()
    assert len(commands) >= 6
    for command in commands:
        line = ["bash", "-c", f"printf '%s\\0' {command}"]
        words = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
        assert words[0] == "fleetbench"
        with nullcontext() if words[1] == "why" else forked_launches():  # forks do not read PYTHONPATH, by which it looks
            assert main(words[1:]) == 0, f"{command}\n{capsys.readouterr()}"
    assert len(list(profiles.iterdir())) == 1


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("short_profiles", "smaller")
def test_the_first_notebook_runs(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """It ends with a verdict, and its real run reaches the target."""
    (tmp_path / "notebooks" / "runs").mkdir(parents=True)
    (tmp_path / "notebooks" / "runs" / "profiles").symlink_to(profiles)
    run_notebook(NOTEBOOKS[0], tmp_path, whole=request.config.getoption("--slow") or request.config.getoption("--whole"))
    said = capsys.readouterr().out
    assert re.search(r"^(USE|KEEP DEFAULT)", said, re.MULTILINE)
    assert re.search(r"^time_to_target_s +\S+ +[\d.]+", said, re.MULTILINE), "the real run reaches its target"
    assert len(list(profiles.iterdir())) == 1
