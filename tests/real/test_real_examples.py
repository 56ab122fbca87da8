"""The examples: every script trains, alone and on two trainers, and docs/scripts.md shows what changes between the two."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fleetbench.strategy import DistributedStrategy
from real.job.launcher import launch_script
from real.job.served_launcher import launch_placed
from real.servers.hosts import on_this_machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TWINS = {
    "digits_plain.py": "train_digits.py",
    "accumulation_plain.py": "accumulation.py",
    "trainer_plain.py": "trainer.py",
    "gpt_plain.py": "gpt.py",
    "words_plain.py": "train_words.py",
}
EPOCHS = {"digits_plain.py": 10, "accumulation_plain.py": 10, "trainer_plain.py": 5, "gpt_plain.py": 4, "words_plain.py": 3}
LEARNT = {"digits_plain.py": 0.2, "accumulation_plain.py": 0.2, "trainer_plain.py": 1.0, "gpt_plain.py": 2.8, "words_plain.py": 2.8}
"""Loss of the last epoch's last batch, of 2.3 at the beginning (of words: 4.2, of characters: 4.6), that every run stays below."""


def _last_loss(text: str, plain: str) -> float:
    found = re.findall(r"^\[Epoch (\d+)\] loss: ([0-9.]+)", text, re.MULTILINE)
    assert [int(epoch) for epoch, _ in found] == list(range(len(found))), text
    assert len(found) == EPOCHS[plain]
    return float(found[-1][1])


@pytest.mark.slow  # train_digits.py is also a command of the README, and accumulation.py trains with another strategy below
@pytest.mark.parametrize(
    "plain", [pytest.param(plain, marks=pytest.mark.whole if plain == "accumulation_plain.py" else []) for plain in TWINS]
)
def test_an_example_trains_on_two_trainers(plain: str, tmp_path: Path) -> None:
    """The twin learns, and only the first trainer prints."""
    echoed: list[bytes] = []
    launch = partial(launch_placed, on_this_machine(1, 2)) if plain == "words_plain.py" else partial(launch_script, 2)
    launch([str(EXAMPLES / TWINS[plain])], log_dir=tmp_path, echo=echoed.append)
    assert _last_loss(b"".join(echoed).decode(), plain) < LEARNT[plain]
    assert "[Epoch" not in (tmp_path / "workerlog.1").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plain",
    [pytest.param(plain, marks=pytest.mark.whole if plain in ("accumulation_plain.py", "trainer_plain.py") else []) for plain in TWINS],
)
def test_an_example_trains_without_fleet(plain: str) -> None:
    """The script that the twin was made from learns in one process, and knows nothing of this package."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(EXAMPLES / plain)], check=True, capture_output=True, text=True, timeout=100, env=environment)
    assert _last_loss(done.stdout, plain) < LEARNT[plain]
    assert "fleet" not in (EXAMPLES / plain).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
        pytest.param({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, marks=pytest.mark.whole),
    ],
)
def test_a_script_that_accumulates_takes_any_strategy(fields: dict[str, object], tmp_path: Path) -> None:
    """The example with its own accumulation loads Local SGD, or a gradient merge around it, and learns."""
    DistributedStrategy.from_dict(fields).save(tmp_path / "recommended.toml")
    echoed: list[bytes] = []
    launch_script(2, [str(EXAMPLES / "accumulation.py"), str(tmp_path / "recommended.toml")], log_dir=tmp_path, echo=echoed.append)
    assert _last_loss(b"".join(echoed).decode(), "accumulation_plain.py") < LEARNT["accumulation_plain.py"]


@pytest.mark.parametrize("plain", TWINS)
def test_the_docs_show_what_changes(plain: str) -> None:
    """The diff of two examples in docs/scripts.md is that of the files."""
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(TWINS)
    names = plain, TWINS[plain]
    before, after = ((EXAMPLES / name).read_text(encoding="utf-8").splitlines() for name in names)
    lines = difflib.unified_diff(before, after, *(f"examples/{name}" for name in names), n=0, lineterm="")
    assert "\n".join(line for line in lines if not line.startswith("@@")) + "\n" in blocks
