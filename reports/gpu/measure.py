"""The first hour on a GPU, as one command: what of this project a machine without one cannot show.

    python reports/gpu/measure.py                                  # every section, an hour at most
    python reports/gpu/measure.py --minutes 10 --only parity_nccl overhead
    python reports/gpu/measure.py --table                          # the last row of every section, measuring nothing

A section appends one row to ``raw.jsonl``: measured, skipped (with what is missing), failed (with its error; the
next goes on), or not reached within the minutes. Without a CUDA device a section that does not need one runs on the CPU, and says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RAW = HERE / "raw.jsonl"
SMALL = {"workload.model": "digits_mlp", "workload.data": "digits", "workload.batch_size": 64, "workload.lr": 0.1}
STRATEGIES: dict[str, dict[str, object]] = {
    "default": {},
    "adam": {"workload.optimizer": "adam", "workload.lr": 0.001},
    "a wire of 16 bits": {"strategy.fp16_allreduce": True},
    "mixed precision, bf16": {"strategy.amp": True, "strategy.amp_configs.dtype": "bf16"},
    "mixed precision, fp16": {"strategy.amp": True, "strategy.amp_configs.dtype": "fp16"},
    "recompute": {"strategy.recompute": True, "strategy.recompute_configs.checkpoints": '["1"]'},
    "Local SGD": {"strategy.localsgd": True, "strategy.localsgd_configs.k_steps": 4},
    "outer optimizer, INT8": {
        "strategy.localsgd": True,
        "strategy.localsgd_configs": '{ k_steps = 4, outer_lr = 0.7, outer_momentum = 0.9, outer_wire = "int8" }',
    },
    "half the learning rate": {"strategy.lr_scale": 0.5},
    "twice the learning rate, Adam, outer optimizer": {
        "workload.optimizer": "adam",
        "workload.lr": 0.001,
        "strategy.lr_scale": 2.0,
        "strategy.localsgd": True,
        "strategy.localsgd_configs": "{ k_steps = 4, outer_lr = 0.7, outer_momentum = 0.9 }",
    },
    "gradient merge": {"strategy.gradient_merge": True, "strategy.gradient_merge_configs.k_steps": 2},
    "compiled blocks": {"strategy.build_strategy.fuse_elewise_add_act_ops": True},
    "asynchronous servers": {"strategy.mode": "ps", "strategy.a_sync": True, "cluster.servers": 1, "cluster.trainers_per_node": 1},
    "settings of the device": {"strategy.cudnn_exhaustive_search": True, "strategy.fraction_of_gpu_memory_to_use": 0.05},
}
"""Keys by the name of what they ask for; trained on the device and on the CPU."""
GPT = ("--width", "128", "--layers", "4", "--length", "64", "--batch", "16", "--lr", "5e-4")
"""Of ``examples/gpt.py``; the learning rate is low."""
RESNET = {"workload.model": "resnet50", "workload.data": "synthetic", "workload.optimizer": "momentum", "workload.lr": 0.01}


class Failed(Exception):  # noqa: N818  # what a section's row says
    """A command ended badly, or not in time."""


@dataclass(frozen=True)
class Ground:
    """Where a section runs."""

    device: str
    num_devices: int
    deadline: float
    folder: Path

    @property
    def backend(self) -> str:
        """NCCL refuses two ranks on one device."""
        return "nccl" if self.num_devices > 1 else "gloo"

    def run(self, command: list[str]) -> str:
        """The command's standard output. Raises ``Failed``."""
        given = os.environ.get("PYTHONPATH")
        paths = [str(ROOT), str(HERE), str(ROOT / "tests/real"), *([given] if given else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        left_s = max(1.0, self.deadline - time.monotonic())
        try:
            done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired as error:
            heard = error.stderr or error.stdout or b""
            said = (heard if isinstance(heard, str) else heard.decode(errors="replace"))[-1500:].replace(f"{ROOT}/", "")
            raise Failed(f"gave no answer within the {left_s:.0f} s that were left: {said}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout)[-1500:].replace(f"{ROOT}/", "")
            raise Failed(f"exit code {done.returncode}: {said}")
        return done.stdout

    def fleetbench(self, name: str, *arguments: str, keys: Mapping[str, object] | None = None, command: Sequence[str] = ()) -> Any:
        """What fleetbench's command ``name`` prints with ``--json``, on this ground's device; ``command``: of a script that it measures."""
        trainers = max(2, self.num_devices)
        given = {"run.device": self.device, "run.backend": self.backend, "cluster.trainers_per_node": trainers, **(keys or {})}
        sets = [part for key, value in given.items() for part in ("--set", f"{key}={str(value).lower() if value is True else value}")]
        script = ["--", *command] if command else []
        (self.folder / "base.toml").write_text('schema = 1\nname = "first_hour"\n', encoding="utf-8")
        return json.loads(self.run([sys.executable, "-m", "fleetbench", name, "base.toml", *arguments, *sets, "--json", *script]))

    def ranks(self, program: str, ranks: int, backend: str) -> Any:
        """The rows of a program of ``rank.py``."""
        launch = [sys.executable, "-m", "fleetbench", "launch", "--nproc", str(ranks), str(HERE / "rank.py")]
        self.run([*launch, program, str(self.folder / "rows.json"), self.device, backend])
        return json.loads((self.folder / "rows.json").read_text(encoding="utf-8"))


def tests(ground: Ground) -> Any:
    """The tests marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/real/test_real_gpu.py")]
    return ground.run(command).splitlines()[-15:]


def _profile(ground: Ground, command: Sequence[str] = (), keys: Mapping[str, object] | None = None) -> Any:
    """Sums over the layers of a profile of one trainer a device, in ms, and its memory."""
    from fleetbench.config import decode
    from fleetbench.profile import Profile

    alone = {"cluster.trainers_per_node": max(1, ground.num_devices), "run.backend": "nccl" if ground.device == "cuda" else "gloo"}
    found = ground.fleetbench(
        "profile", "--seconds", "10" if ground.device == "cuda" else "1", keys={**alone, **(keys or {})}, command=command
    )
    fields = {field.name for field in dataclasses.fields(Profile)}
    profile = decode({name: value for name, value in found.items() if name in fields}, Profile, "profile")
    table = profile.tables[0]
    times = {"forward": table.forward_ns, "backward": table.backward_ns, "update": table.update}
    return {"layers": len(table.layers), **{f"{name}_ms": ns / 1e6 for name, ns in times.items()}, "memory": found["memory"]}


def profile_resnet50(ground: Ground) -> Any:
    """ResNet-50: 224 pixels and a batch of 64; 32 pixels and 4 on a CPU."""
    size, batch = (224, 64) if ground.device == "cuda" else (32, 4)
    options = {"workload.data_options": f"{{ image_size = {size}, samples = 512 }}", "workload.batch_size": batch}
    return _profile(ground, keys={**RESNET, **options})


def profile_gpt(ground: Ground) -> Any:
    """A small GPT: 12 layers of 768, 8 x 512 tokens; 2 layers of 64, 2 x 32 on a CPU."""
    launch = [sys.executable, "-m", "fleetbench", "launch", "--nproc", str(max(1, ground.num_devices))]
    return _profile(ground, [*launch, str(HERE / "rank.py"), "gpt"])


def tune(ground: Ground) -> Any:
    """One search with its verdict."""
    keys = {**SMALL, "tune.trials": 10, "tune.finalists": 1, "tune.leg_steps": 20, "tune.local_steps": "[1, 2]", "tune.thread_num": "[1]"}
    found = ground.fleetbench("tune", keys=keys)
    return {key: found[key] for key in ("verdict", "speedup", "reason", "pairs") if key in found}


def sim_against_real(ground: Ground) -> Any:
    """The mean step of a real run, and of its simulation with a profile taken before."""
    keys = {**SMALL, "workload.steps": 200 if ground.device == "cuda" else 40}
    ground.fleetbench("profile", "--seconds", "5" if ground.device == "cuda" else "1", keys=keys)
    (measured,) = (ground.folder / "runs").glob("*-profile-*/measured.toml")
    simulated = json.loads(ground.run([sys.executable, "-m", "fleetbench", "sim", str(measured), "--out", "runs", "--json"]))
    real = ground.fleetbench("real", keys=keys)
    means = {name: run["step_s"]["mean"] for name, run in (("simulated_s", simulated), ("real_s", real))}
    return means | {"ratio": means["simulated_s"] / means["real_s"]}


def script(ground: Ground) -> Any:
    """A script of one's own, two trainers on one device: tuned, then launched with what it was recommended, and without; and one alone."""
    example = str(ROOT / "examples/gpt.py")
    (ground.folder / "plain.toml").write_text("schema = 1\n[strategy]\n", encoding="utf-8")
    launch = [sys.executable, "-m", "fleetbench", "launch", "--nproc", "2", example, *GPT]
    (ground.folder / "base.toml").write_text('schema = 1\nname = "script"\n', encoding="utf-8")
    sets = (
        "tune.finalists=1",
        "tune.leg_steps=20",
        "tune.local_steps=[1, 8]",
        "tune.lr_scale=[2, 4]",
        "tune.diloco=false",
        "tune.pairs=6",
        "tune.budget_minutes=5",
        "workload.target_loss=2.5",
        "workload.steps=400",
    )
    given = [part for one in sets for part in ("--set", one)]
    tuned = [sys.executable, "-m", "fleetbench", "tune", "base.toml", *given, "--json", "--", *launch, "--strategy", "plain.toml"]
    found = json.loads(ground.run(tuned))
    recommended = next((ground.folder / "runs").glob("*/recommended.toml"))
    rows = []
    for strategy in ("plain.toml", str(recommended), str(recommended), "plain.toml"):
        begin = time.monotonic()
        said = ground.run([*launch, "--strategy", strategy, "--epochs", "2"])
        rows.append({"strategy": Path(strategy).name, "seconds": time.monotonic() - begin, "said": said.splitlines()[-1]})
    alone = {
        name: ground.run([sys.executable, str(ROOT / f"examples/{name}"), *GPT, *options]).splitlines()[-1]
        for name, options in (("gpt_plain.py", ()), ("gpt.py", ("--strategy", "plain.toml")))
    }
    kept = {key: found[key] for key in ("verdict", "speedup", "reason", "pairs", "notes") if key in found}
    return {**kept, "recommended": recommended.read_text(encoding="utf-8"), "launched": rows, "alone": alone}


def virtual(ground: Ground) -> Any:
    """What virtual trainers learn on the device, beside those on the CPU."""
    return json.loads(ground.run([sys.executable, str(HERE / "virtual.py"), "parity"]))


def virtual_speed(ground: Ground) -> Any:
    """Steps of a virtual trainer a second, on the device and on a core."""
    return json.loads(ground.run([sys.executable, str(HERE / "virtual.py"), "speed"]))


def compiled(ground: Ground) -> Any:
    """Compiled blocks, to the end of a real run, with the minutes that their compiler takes."""
    keys = {**STRATEGIES["compiled blocks"], "run.timeout": "300 s", "run.startup_timeout": "300 s"}
    return {device: _final_loss(ground, keys, device, number) for number, device in enumerate((ground.device, "cpu"))}


def _final_loss(ground: Ground, keys: Mapping[str, object], device: str, number: int) -> float | str:
    """Of a real run of its own folder; or what went wrong."""
    folder = ground.folder / f"{number}-{device}"
    folder.mkdir()
    own = dataclasses.replace(ground, folder=folder)
    try:
        run = own.fleetbench("real", keys={**SMALL, "workload.steps": 24, **keys, "run.device": device, "run.backend": "gloo"})
    except Failed as error:
        return str(error)
    return float(run["final_loss"])


def strategies(ground: Ground) -> Any:
    """The loss at the end of real runs, on the device and on the CPU, which take the same batches from the same parameters."""
    with ThreadPoolExecutor(14) as pool:
        losses = {
            name: [pool.submit(_final_loss, ground, keys, device, number) for device in (ground.device, "cpu")]
            for number, (name, keys) in enumerate(STRATEGIES.items())
        }
        return [
            {"strategy": name, **dict(zip(("device", "cpu"), (run.result() for run in pair), strict=True))} for name, pair in losses.items()
        ]


@dataclass(frozen=True)
class Section:
    """What is measured, and whether only a device can."""

    measure: Callable[[Ground], Any]
    needs_cuda: bool = False


SECTIONS: dict[str, Section] = {
    "tests": Section(tests, needs_cuda=True),
    "parity_nccl": Section(lambda ground: ground.ranks("parity", max(1, ground.num_devices), "nccl"), needs_cuda=True),
    "parity_gloo": Section(lambda ground: ground.ranks("parity", 2, "gloo")),
    "strategies": Section(strategies, needs_cuda=True),
    "overhead": Section(lambda ground: ground.ranks("overhead", 1, "nccl" if ground.device == "cuda" else "gloo")),
    "delays": Section(lambda ground: ground.ranks("delays", 1, "gloo")),
    "compile": Section(lambda ground: ground.ranks("compile", 1, "nccl" if ground.device == "cuda" else "gloo")),
    "graphs": Section(lambda ground: ground.ranks("graphs", 1, "nccl"), needs_cuda=True),
    "profile_resnet50": Section(profile_resnet50),
    "profile_gpt": Section(profile_gpt),
    "sim_against_real": Section(sim_against_real),
    "tune": Section(tune),
    "script": Section(script),
    "virtual": Section(virtual, needs_cuda=True),
    "virtual_speed": Section(virtual_speed, needs_cuda=True),
    "compiled": Section(compiled),
}


def measured(section: Section, ground: Ground) -> dict[str, Any]:
    """Status and values of a section, whatever happens in it."""
    if section.needs_cuda and ground.device != "cuda":
        return {"status": "skipped: no CUDA device"}
    if time.monotonic() > ground.deadline:
        return {"status": "not reached"}
    try:
        return {"status": "measured", "values": section.measure(ground)}
    except Exception as error:  # noqa: BLE001  # the row says it, and the next section goes on
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}


def table() -> str:
    """The last row of every section, as Markdown."""
    last = {row["section"]: row for row in map(json.loads, RAW.read_text(encoding="utf-8").splitlines())}
    lines = ["| section | device | status | seconds | values |", "|---|---|---|---|---|"]
    for name, row in last.items():
        values = json.dumps(row.get("values", row.get("error", "")))
        short = values if len(values) <= 300 else f"{values[:300]} ..."
        lines.append(f"| {name} | {row['device']} | {row['status']} | {row['seconds']} | {short.replace('|', '/')} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, a row a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--each", type=float, default=20.0, help="minutes a section takes at most")
    parser.add_argument("--commit", help="of the code, where no .git lies beside it")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    sys.path.insert(0, str(ROOT))
    import torch

    from fleetbench.store import commit, machine, versions

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = "cuda" if num_devices else "cpu"
    named = torch.cuda.get_device_name(0) if num_devices else "cpu"
    origin = {
        "commit": options.commit or commit(),
        "machine": machine(),
        "versions": versions(),
        "device": named,
        "num_devices": num_devices,
    }
    deadline = time.monotonic() + 60 * options.minutes
    for name in options.only:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            ends = min(deadline, begin + 60 * options.each)
            row = measured(SECTIONS[name], Ground(device, num_devices, ends, Path(folder)))
        taken = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(time.monotonic() - begin, 1)}
        with RAW.open("a", encoding="utf-8") as raw:
            raw.write(json.dumps({"section": name, **row, **taken, **origin}) + "\n")
        print(f"{name}: {row['status']} ({taken['seconds']} s)", file=sys.stderr)
    print(table())


if __name__ == "__main__":
    main()
