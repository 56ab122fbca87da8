"""What a command's environment does to its processes, and what is said where nothing attaches; most processes here import no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbench.cli.main import main
from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.attach.settings import combined
from real.processes.attached import NEVER_CALLED, attached_environment, why_unattached

HERE = Path(__file__).parent


@pytest.fixture
def strategy(tmp_path: Path) -> Path:
    """A file."""
    file = tmp_path / "strategy.toml"
    file.write_text("fuse_grad_size_in_MB = 1\n")
    return file


def run(folder: Path, *arguments: str, base: dict[str, str] | None = None) -> str:
    """What ``python ARGUMENTS...`` prints in a process that is to attach."""
    variables = {**os.environ, **attached_environment(folder, base=base or {})}
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=True).stdout


def test_a_sitecustomize_that_was_there_runs_too(tmp_path: Path) -> None:
    """It takes the place of ours, as if nothing had been before it on the path; and in a process without a job, too."""
    (tmp_path / "sitecustomize.py").write_text("print('theirs', __file__)\n")
    code = (
        "import sitecustomize, sys; print(sitecustomize.__file__, [type(each).__name__ for each in sys.meta_path if '_' in repr(each)][:1])"
    )
    theirs = str(tmp_path / "sitecustomize.py")
    said = run(tmp_path, "-c", code, base={"PYTHONPATH": str(tmp_path)})
    assert said.split()[:3] == ["theirs", theirs, theirs]
    assert "_Finder" in said
    variables = {**os.environ, **attached_environment(tmp_path, base={"PYTHONPATH": str(tmp_path)})}
    del variables["FLEETBENCH_ATTACH"]
    alone = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True).stdout
    assert alone.split()[:3] == ["theirs", theirs, theirs]
    assert "_Finder" not in alone


def test_nothing_of_torchs_or_ours_is_imported_for_it(tmp_path: Path) -> None:
    """A process without DistributedDataParallel pays for a file of a hundred lines."""
    code = "import sys; print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'real', 'fleetbench', 'numpy'}))"
    assert run(tmp_path, "-S", "-c", "import site; site.main(); " + code).strip().endswith("[]")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "no Python process here has read PYTHONPATH, as with python -I or -E, or in a container"),
        (["seen"], NEVER_CALLED),
        (["seen", "unattached"], "its own words"),
        (["seen", "unattached", "attached"], None),
    ],
)
def test_why_nothing_attached_is_a_sentence(files: list[str], why: str | None, tmp_path: Path) -> None:
    """Of what the processes have left; none where one has attached."""
    for name in files:
        (tmp_path / name).write_text("its own words")
    assert why_unattached(tmp_path) == why


@pytest.mark.parametrize(("options", "why"), [([], NEVER_CALLED), (["-I"], "no Python process here has read PYTHONPATH")])
def test_a_strategy_that_was_not_applied_is_an_error(
    options: list[str], why: str, strategy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that ends well and has trained by no strategy does not end with exit code 0."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    assert main(["launch", "--strategy", str(strategy), "--", sys.executable, *options, str(script)]) == 2
    said = capsys.readouterr().err
    assert f"--strategy: was not applied: {why}" in said
    assert "put fleet's lines into the script" in said.partition("HINT: ")[2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--strategy", "{}", "--", sys.executable, "-c", "raise SystemExit(7)"], 4, "the command: ended with exit code 7"),
        (["--strategy", "{}"], 2, "no command follows it, and no --nproc"),
        (["--strategy", "{}", "--", "no-such-program"], 3, "cannot be started"),
        (["--strategy", "{}", "--servers", "1", "--workers", "1", "x.py"], 2, "with neither --nproc nor --strategy"),
        (["--strategy", "{}", "--", "torchrun", "missing.py"], 2, "no such script"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(
    words: list[str], code: int, said: str, strategy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exit code of its kind."""
    assert main(["launch", *(word.format(strategy) for word in words)]) == code
    assert said in capsys.readouterr().err


def test_a_file_does_not_take_a_scripts_wire_away() -> None:
    """Gradients that the script rounds are not exchanged otherwise without a word; under local steps none are exchanged."""
    own, local = DistributedStrategy(fp16_allreduce=True, broadcast_buffers=False), DistributedStrategy().replace(localsgd=True)
    with pytest.raises(ConfigError, match="sends 16 bits, and the strategy 32") as caught:
        combined(DistributedStrategy(fuse_grad_size_in_MB=1.0), own)
    assert "fp16_allreduce = true" in str(caught.value.hint)
    assert combined(DistributedStrategy(bf16_allreduce=True), own).bf16_allreduce
    assert combined(local, own) == local.replace(broadcast_buffers=False)
