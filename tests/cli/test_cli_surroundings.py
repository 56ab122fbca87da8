"""Odd surroundings: whatever a shell, a file system or a locale does, a command ends as it should or with an error that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXPERIMENT = """\
[workload]
model = "layers"
layers = [{ name = "block", params = 1000, forward = "1 ms", backward = "2 ms" }]
steps = 5
[cluster]
trainers_per_node = 2
intra = { bandwidth = "8 Gbit/s", latency = "50 us" }
[tune]
trials = 4
[run]
device = "emulated"
warmup_steps = 0
"""
SCRIPT = """\
import torch
from fleetbench import fleet
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
fleet.save_persistables("checkpoint")
"""
COMMANDS = {
    "sim": "sim odd.toml --out {out}",
    "real": "real odd.toml --out {out}",
    "tune": "tune --simulate-only odd.toml --out {out}",
    "launch": "launch --nproc 2 --log-dir {out} script.py",
}


NO_POWERS = "--bounding-set=-dac_override,-dac_read_search"
"""Permissions of files hold for root, too."""


@dataclass(frozen=True)
class Surroundings:
    """A shell's lines before the command, and what follows it; the files of an experiment and of a script lie in the working directory."""

    name: str
    before: str = ""
    after: str = ""
    codes: tuple[int, ...] = (0,)
    """Exit codes of the commands."""
    needs_root: bool = False
    """For mounts of its own, which end with the shell, and for permissions."""
    out: str = "out"
    """The folder of the results."""
    commands: tuple[str, ...] = tuple(COMMANDS)


SHADOWS = ("torch.py", "simpy.py", "sim.py", "real/__init__.py", "tuner.py", "typing.py", "random.py")
PLAIN = ("sim", "real")
TMPFS = "mount -t tmpfs -o"
SURROUNDINGS = (
    Surroundings("stdout is full", after=">/dev/full", codes=(3,)),
    Surroundings("no HOME", "unset HOME", commands=("sim", "launch")),
    Surroundings("HOME is missing", "export HOME=/nonexistent", commands=PLAIN),
    Surroundings("locale POSIX", "export LC_ALL=POSIX", out="café", commands=("sim", "launch")),
    Surroundings("locale tr_TR", "export LC_ALL=tr_TR.UTF-8", out="İıç", commands=PLAIN),
    Surroundings("no locale", "unset LANG LC_ALL LC_CTYPE", out="café", commands=("sim", "tune")),
    *(Surroundings(f"own {name}", f"mkdir -p real; echo 'raise SystemExit(77)' > {name}", commands=("sim",)) for name in SHADOWS),
    *(Surroundings(f"own {name}", f"echo 'raise SystemExit(77)' > {name}", commands=("real",)) for name in ("simpy.py", "sim.py")),
    Surroundings("own sim.py", "echo 'raise SystemExit(77)' > sim.py", codes=(4,), commands=("launch",)),  # the script cannot have ours
    Surroundings("nobody reads", "set -o pipefail", "| head -0", commands=("sim", "tune", "launch")),
    Surroundings("one column", after="", commands=("sim", "tune")),
    Surroundings("NO_COLOR", "export NO_COLOR=1 FORCE_COLOR=1", commands=("sim",)),
    Surroundings("PYTHONOPTIMIZE", "export PYTHONOPTIMIZE=2", commands=("sim", "launch")),
    Surroundings("no bytecode", "export PYTHONDONTWRITEBYTECODE=1", commands=("sim",)),
    Surroundings("nice", "renice -n 19 $$ >/dev/null", commands=("sim",)),
    Surroundings("OMP_NUM_THREADS is no number", "export OMP_NUM_THREADS=abc", commands=("sim", "launch")),
    Surroundings("TMPDIR of somebody else", "chmod 0 tmp", codes=(0, 3), needs_root=True, commands=("launch",)),
    Surroundings("--out of somebody else", "chmod 0 full", codes=(2, 3), needs_root=True, out="full/out", commands=("sim", "real", "tune")),
    Surroundings("full TMPDIR", f"{TMPFS} size=16k tmpfs tmp", needs_root=True, commands=("sim", "tune")),
    Surroundings("full TMPDIR", f"{TMPFS} size=16k tmpfs tmp", codes=(3,), needs_root=True, commands=("real", "launch")),
    Surroundings("read-only TMPDIR", f"{TMPFS} ro tmpfs tmp", codes=(0, 3), needs_root=True, commands=("sim", "launch")),
    Surroundings("full --out", f"{TMPFS} size=16k tmpfs full", codes=(3,), needs_root=True, out="full/out", commands=("sim", "tune")),
    Surroundings("read-only --out", f"{TMPFS} ro tmpfs full", codes=(2, 3), needs_root=True, out="full/out"),
    Surroundings(
        "read-only working directory", "mount --bind . . && mount -o remount,bind,ro . && cd ../here", codes=(2, 3), needs_root=True
    ),
    Surroundings("tiny /dev/shm", f"{TMPFS} size=4k tmpfs /dev/shm", needs_root=True, commands=PLAIN),
    Surroundings("read-only /dev/shm", f"{TMPFS} ro tmpfs /dev/shm", needs_root=True, commands=("sim",)),
)
QUICK = (
    ("full TMPDIR", "launch"),
    ("own random.py", "sim"),
    ("OMP_NUM_THREADS is no number", "sim"),
)


def _parameters() -> list[object]:
    found = []
    for around in SURROUNDINGS:
        for command in around.commands:
            marks = [pytest.mark.root] if around.needs_root else []
            marks += [] if (around.name, command) in QUICK else [pytest.mark.slow]
            found.append(pytest.param(around, command, id=f"{around.name}-{command}", marks=marks))
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(("around", "command"), _parameters())
def test_a_command_ends_well_or_says_why_not(around: Surroundings, command: str, tmp_path: Path) -> None:
    """With the exit code that is expected and never with a traceback; an error has a hint; nothing half-written stays."""
    here = tmp_path / "here"
    for folder in (here, here / "tmp", here / "full"):
        folder.mkdir()
    (here / "odd.toml").write_text(EXPERIMENT, encoding="utf-8")
    (here / "script.py").write_text(SCRIPT, encoding="utf-8")
    program = Path(sys.executable).with_name("fleetbench")
    line = f"'{program}' {COMMANDS[command].format(out=around.out)} {around.after}"
    if around.name == "one column":
        line = f'script --quiet --return --command "stty columns 1; {line}" /dev/null'
    apart = ["unshare", "--mount", "setpriv", NO_POWERS] if around.needs_root else []
    words = [*apart, "bash", "-c", f"{around.before}\n{line}"]
    environment = {**os.environ, "TMPDIR": str(here / "tmp")}
    done = subprocess.run(words, cwd=here, env=environment, capture_output=True, check=False, timeout=200)
    said = done.stderr.decode(errors="replace")
    assert "Traceback" not in said or (command, done.returncode) == ("launch", 4), said  # a trainer's own
    assert done.returncode in around.codes, said
    assert done.returncode == 0 or "HINT: " in said, said
    left = [path.name for path in (here / "tmp").iterdir() if path.name.startswith("fleetbench-")]
    assert left == [] or (done.returncode == 4 and f"{left[0]}/log" in said), left  # the logs that an error names stay
