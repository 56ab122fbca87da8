"""fleetbench why of a script that calls ``fully_shard`` itself, on two ranks of gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fleetbench.cli.main import main

SCRIPT = str(Path(__file__).parents[1] / "real" / "fsdp_script.py")


def launch(*words: str) -> list[str]:
    """A launch of the script."""
    return [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", SCRIPT, *words]


@pytest.mark.slow
def test_a_slow_rank_is_told_from_gathers_and_scatters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 sleeps in its forward; gathers and scatters are told apart, and losses are those of the script alone."""
    assert (
        main(
            [
                "why",
                "--json",
                "--seconds",
                "10",
                "--out",
                str(tmp_path / "runs"),
                "--",
                *launch(str(tmp_path), "slow"),
            ]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    causes = {cause["name"]: cause for cause in answer["causes"]}
    assert answer["causes"][0]["name"] == "a slow rank"
    assert "rank 1 computes its forward" in causes["a slow rank"]["what"]
    kinds = {share["kind"] for share in answer["shares"]}
    assert {"gathers", "regathers", "gradients", "forward", "backward"} <= kinds
    assert "collective" not in kinds
    assert sum(part["seconds"] for part in answer["parts"]) == pytest.approx(answer["step_s"], rel=0.01)
    seen = [(tmp_path / f"losses{rank}").read_text(encoding="ascii").split()[:15] for rank in (0, 1)]
    for file in tmp_path.glob("losses*"):
        file.unlink()
    assert main(["launch", "--nproc", "2", SCRIPT, str(tmp_path), "slow", "15"]) == 0
    assert seen == [(tmp_path / f"losses{rank}").read_text(encoding="ascii").split() for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("first", "is FSDP1"),
        pytest.param("mixed", "trains beside models of DistributedDataParallel", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_looked_at(kind: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP1, and a DistributedDataParallel beside a sharded model, end with a sentence, and at once."""
    assert main(["why", "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), kind)]) == 2
    assert what in capsys.readouterr().err
