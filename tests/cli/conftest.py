"""Experiment files without jitter, whose step times are known by hand, and a way to run the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetbench.cli.main import main

LAYERS = """\
schema = 1
name = "{name}"

[workload]
model = "layers"
steps = {steps}
layers = [{{ name = "block", params = 1, forward = "2 ms", backward = "{backward}", repeat = 4 }}]

[cluster]
nodes = 1
trainers_per_node = 1

[run]
warmup_steps = 0
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command line in this process."""

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's way out
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., Path]:
    """Write an experiment of one trainer, whose step takes 4 x (2 ms + ``backward``) to the nanosecond."""

    def write(name: str = "layers", *, backward: str = "3 ms", steps: int = 5, more: str = "") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(LAYERS.format(name=name, backward=backward, steps=steps) + more, encoding="utf-8")
        return path

    return write
