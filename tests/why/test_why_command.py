"""fleetbench why: on two ranks of gloo, as users start them."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
from profiled_devices import Device

from fleetbench.cli.main import main
from real.processes.place import make_folder

SCRIPT = str(Path(__file__).with_name("looked_at.py"))


def launch(*words: str, nproc: int = 2) -> list[str]:
    """A launch of the script."""
    return [sys.executable, "-m", "fleetbench", "launch", "--nproc", str(nproc), SCRIPT, *words]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, object]:
    """The answer as JSON."""
    ended = main(["why", "--json", *words])
    said = capsys.readouterr()
    assert ended == code, said.err
    answer: dict[str, object] = json.loads(said.out)
    return answer


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "cause", "remedy"),
    [
        ("slow", "a slow rank", ""),
        ("fleet", "a slow rank", ""),
        ("evaluates", "periodic work", "evaluate less often"),
        pytest.param("buffers", "buffers", "broadcast_buffers=False", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_the_first_cause(kind: str, cause: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault is named, the parts add up to a step, and the first steps are what they are without; in the end ranks have one state.

    Optimizers are SGD with momentum, and AdamW; some of the steps exchange nothing.
    """
    words = ["--seconds", "12", "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), kind)]
    answer = told(capsys, *words)
    first = answer["causes"][0]  # type: ignore[index]  # a list
    assert first["name"] == cause
    assert remedy in first["remedy"]
    parts = answer["parts"]
    assert sum(part["seconds"] for part in parts) == pytest.approx(answer["step_s"], rel=0.01)  # type: ignore[attr-defined]  # as above
    folder = Path(str(answer["folder"]))
    assert {path.name for path in folder.iterdir()} == {"why.json", "why.html", "manifest.json"}
    assert "data:image/svg+xml" in (folder / "why.html").read_text(encoding="utf-8")
    first_state, second_state = ((tmp_path / f"state{rank}").read_text(encoding="ascii").split() for rank in (0, 1))
    assert first_state == second_state
    assert len(first_state) > 4  # of parameters, and of what the optimizer has of each
    seen = [(tmp_path / f"losses{rank}").read_text(encoding="ascii").split() for rank in (0, 1)]
    for file in tmp_path.glob("losses*"):
        file.unlink()
    assert main(["launch", "--nproc", "2", SCRIPT, str(tmp_path), kind, "15"]) == 0
    assert [own[:15] for own in seen] == [(tmp_path / f"losses{rank}").read_text(encoding="ascii").split() for rank in (0, 1)]


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with its error, and stores nothing; the next start leaves the output that the error names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the ranks' output is kept for the user
    assert main(["why", "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), "dies")]) == 4
    said = capsys.readouterr().err
    assert "rank 1" in said
    assert "ValueError: no more" in said
    make_folder()
    (log,) = [path for path in tmp_path.glob("fleetbench-*/*/command.log") if str(path) in said]
    assert "ValueError: no more" in log.read_text(encoding="utf-8")
    assert not list(tmp_path.glob("runs/*why*"))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 comes to no forward, and rank 0, which waits for it, is not blamed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the ranks' output is kept for the user
    words = ["--set", "run.timeout='5 s'", "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), "hangs")]
    assert main(["why", *words]) == 4
    assert "rank 1: stopped answering" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_ends_by_itself_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps are divided, without links and trials; also of a compiled model, whose process group is gone by then."""
    answer = told(capsys, "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), "compiled", "40"))
    assert answer["steps"] == 34  # after five of warm-up, and without the last, whose exchange no forward follows
    assert any("ended by itself" in note for note in answer["notes"])  # type: ignore[attr-defined]  # a list; a busy host is told of, too


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["none", "8"], "no step that could be looked at"),
        (["updates"], "in 1000 forwards no optimizer of the model has stepped"),
        pytest.param(["plain", "3"], "before enough of its", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_looked_at(words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script without DDP, one that updates by hand, and one that is over at once end with a sentence."""
    nproc = 1 if words[0] == "none" else 2
    assert main(["why", "--out", str(tmp_path / "runs"), "--", *launch(str(tmp_path), *words, nproc=nproc)]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "takes either a command that trains, or traces"),
        (["trace.json", "--", "python", "train.py"], "takes either a command that trains, or traces"),
        (["--link", "2", "--", sys.executable, SCRIPT], "is for traces"),
        (["missing.json"], "missing.json"),
        (["--against", "missing", "--", sys.executable, SCRIPT], "missing"),
        (["--fail-above", "-1", "--", sys.executable, SCRIPT], "above zero"),
    ],
)
def test_bad_usage(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes no sense is said before anything is started."""
    monkeypatch.chdir(tmp_path)
    assert main(["why", *words]) == 2
    assert what in capsys.readouterr().err


@pytest.fixture
def traces(tmp_path: Path) -> list[str]:
    """Traces of two ranks that compute and communicate by turns."""
    return [str(_written(rank, tmp_path, 6000)) for rank in (0, 1)]


def _written(rank: int, folder: Path, communication: int) -> Path:
    device = Device(rank=rank, lag=0)
    begin = 0
    for number in range(6):
        begin = device.step(number, begin, [(7, 4000, False), (13, communication, True)])
    return device.write(folder / f"rank{rank}.json")


def test_traces_are_answered_and_gated(traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six tenths of each step are communication: more than 20 %, and no more than 70 %; and a link twice as fast is projected."""
    out = ["--out", str(tmp_path / "runs")]
    answer = told(capsys, *traces, *out, "--link", "2", "--fail-above", "70")
    assert answer["causes"][0]["name"] == "the network"  # type: ignore[index]  # a list
    assert any("links 2 times as fast" in note for note in answer["notes"])  # type: ignore[attr-defined]  # as above
    told(capsys, *traces, *out, "--fail-above", "20", code=1)


def test_what_became_slower(traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside an older answer, the part that grew is named with what it grew by."""
    out = ["--out", str(tmp_path / "runs")]
    before = told(capsys, *traces, *out)
    slower = [str(_written(rank, tmp_path / "later", 16000)) for rank in (0, 1)]
    assert main(["why", *slower, *out, "--against", str(before["folder"])]) == 0
    said = capsys.readouterr().out
    assert "since then: a step takes 0.803 -> 1.80 ms (+" in said
    assert "+1.00 ms  gradients that the backward does not hide" in said
