"""Run the public scripts of public.csv alone, then under ``why``, ``profile`` and ``tune``: ``python public.py FOLDER [ROW ...]``.

FOLDER has ``src/OWNER+NAME`` (each repository), ``data`` (made-up inputs, where a script starts) and ``env/NAME`` (an environment with
fleetbench). A row's ``command`` and ``environment`` stand as they were typed, with ``{src}`` for the first. Outputs go to
``FOLDER/results/ROW``; a line of JSON per row is printed. The losses of every ``backward()`` are recorded in every bit.
"""

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RECORDER = """
import os, random, sys
class Finder:
    def find_spec(self, name, where=None, target=None):
        if name != "torch.optim":
            return None
        sys.meta_path.remove(self)
        torch, file = sys.modules["torch"], None
        Tensor = torch.Tensor
        random.seed(0)
        torch.default_generator.manual_seed(0)
        backward = Tensor.backward
        def recorded(tensor, *args, **kwargs):
            nonlocal file
            if tensor.numel() == 1:
                if file is None:
                    import torch.distributed as dist
                    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
                    file = open(os.path.join(os.environ["LOSSES"], f"{rank}-{os.getpid()}"), "w", buffering=1)
                print(float(tensor.detach()).hex(), file=file)
            return backward(tensor, *args, **kwargs)
        Tensor.backward = recorded
sys.meta_path.insert(0, Finder())
"""
ENOUGH = 20
"""Losses of each rank after which the script alone is ended."""
WAYS = {
    "alone": ([], 100),
    "why": (["fleetbench", "why", "--seconds", "10", "--"], 300),
    "profile": (["fleetbench", "profile", "--seconds", "3", "--"], 300),
    "tune": (["fleetbench", "tune", "--set", "tune.budget_minutes=6", "--"], 480),
}


def run(folder: Path, row: dict[str, str], way: str) -> dict[str, object]:
    """Run a row's command in one way, and end it with its group after the way's time."""
    words, limit_s = WAYS[way]
    place = folder / "results" / row["row"] / way
    shutil.rmtree(place, ignore_errors=True)
    start_in = folder / "work" / row["row"]
    for inside in [*start_in.glob("*")]:
        if inside.name != "runs":  # where a tuning finds the profile of the last hour
            shutil.rmtree(inside) if inside.is_dir() and not inside.is_symlink() else inside.unlink()
    shutil.copytree(folder / "data", start_in, copy_function=os.symlink, dirs_exist_ok=True)
    place.mkdir(parents=True)
    (place / "site").mkdir()
    (place / "losses").mkdir()
    (place / "site" / "sitecustomize.py").write_text(RECORDER)
    asked = dict(word.split("=", 1) for word in row["environment"].format(src=folder / "src").split())
    path = [str(place / "site"), *filter(None, [asked.pop("PYTHONPATH", "")])]
    binaries = folder / "env" / row["env"] / "bin"
    environment = os.environ | asked | {"PYTHONPATH": os.pathsep.join(path), "LOSSES": str(place / "losses"), "HF_HUB_OFFLINE": "1"}
    environment |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    command = [*words, "bash", "-c", row["command"].format(src=folder / "src")]
    if not any(sign in row["command"] for sign in "&;|"):
        command = [*words, *command[-1].split()]
    start = time.monotonic()
    with (place / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=start_in, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        code: int | str | None = None
        while (code := process.poll()) is None and time.monotonic() < start + limit_s:
            time.sleep(0.5)
            if way == "alone" and all(len(mine) >= ENOUGH for mine in first_starts(place / "losses", 2)):
                break
        if code is None:
            code = "ended"
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"code": code, "seconds": round(time.monotonic() - start)}


def first_starts(folder: Path, num_ranks: int) -> list[list[str]]:
    """Each rank's losses of the process that recorded first, shape [rank][backward]; empty where a rank has recorded none."""
    files = sorted(folder.iterdir(), key=lambda file: int(file.name.split("-")[1]))
    found = ([file for file in files if file.name.startswith(f"{rank}-")] for rank in range(num_ranks))
    return [mine[0].read_text().splitlines() if mine else [] for mine in found]


def equal(alone: list[list[str]], other: list[list[str]]) -> str:
    """How many losses are the script's own before the first that is not, of how many that both have: the least of all ranks."""
    counts = []
    for mine, its in zip(alone, other, strict=True):
        pairs = list(zip(mine, its, strict=False))
        counts.append((next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs)), len(pairs)))
    return "{} of {}".format(*min(counts))


def main() -> None:
    """Run the rows that are asked for, or all."""
    folder = Path(sys.argv[1]).resolve()
    with Path(__file__).with_name("public.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["command"] and (len(sys.argv) == 2 or row["row"] in sys.argv[2:])]
    for row in rows:
        answer: dict[str, object] = {"row": row["row"]}
        for way in os.environ.get("WAYS", " ".join(WAYS)).split():
            answer[way] = run(folder, row, way)
            alone = first_starts(folder / "results" / row["row"] / "alone" / "losses", 2)
            if not all(alone):
                break  # it does not run here
        for way in WAYS:
            if way != "alone" and (folder / "results" / row["row"] / way).exists():
                answer[f"equal under {way}"] = equal(alone, first_starts(folder / "results" / row["row"] / way / "losses", 2))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
