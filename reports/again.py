"""Run again what any machine can within minutes, and say which committed figures moved: ``make reports``.

Each script runs in a copy of the reports, so that nothing here changes. The rows of the tables that it prints, and the data files that it
writes, are compared number by number with those of its committed README and files. A figure has moved where it differs by more than the
script's spread: none for what is computed from committed data, and more for what draws lots or takes time. What cannot run here is listed
with the reason. Exit code 1 where a figure moved or a script failed. ``python reports/again.py network tuner`` runs these folders alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
DATA = {".csv", ".json", ".jsonl"}
NOT_FIGURES = re.compile(r'"(date|at|created|commit|machine|versions|system|processor|sha256|took_s)"')
"""Lines of data files that say when and where."""


@dataclass(frozen=True)
class Script:
    """What runs again: its path below ``reports`` with arguments, and by which share its figures differ between two runs."""

    command: str
    spread: float = 0.0


AGAIN = (
    Script("network/fusion.py"),
    Script("nccl_model/predict.py"),
    Script("gpt_data_parallel/predict.py"),
    Script("estimate/fit.py"),
    Script("straggler_traces/analyse.py"),
    Script("fidelity/measure.py --tables"),
    Script("server_learning/tables.py"),
    Script("diloco/losses.py --tables"),
    Script("simulate_only/session.py", spread=0.001),
)
ELSEWHERE = {
    "calibrate, nccl_model/nodes": "need tables of ddl-benchmarks, and of Alps and Polaris, which state no licence",
    "gpu": "needs a CUDA device",
    "fidelity, testbed, network/declared, parameter_server": "need root, network namespaces and a quiet machine for half an hour",
    "quickstart, planted_truths, your_script, profile, beside_ddp": "take times of real runs: a quiet machine for an hour",
    "simulator_speed, simulate_only, virtual_trainers": "take times of one quiet core",
    "engines_agree, as_ddp_or_refused, kill_matrix, damaged_files": "campaigns of hours",
    "tuner": "bootstraps of some minutes: its README has the commands",
}


def rows(lines: Iterable[str]) -> dict[str, list[list[float]]]:
    """The numbers of table rows, and of lines of data, by the words beside them."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for line in lines:
        if not NOT_FIGURES.search(line) and (own := [float(number.replace(",", "")) for number in NUMBER.findall(line)]):
            found[re.sub(r"[^A-Za-z|#]+", "", NUMBER.sub("#", line))].append(own)
    return found


def moved(again: dict[str, list[list[float]]], committed: dict[str, list[list[float]]], spread: float) -> tuple[int, list[str]]:
    """How many rows have a committed one of the same words, and those of them that have none within the spread."""
    compared, out = 0, []
    for words, values in ((words, values) for words, own in again.items() if words in committed for values in own):
        compared += 1
        nearest = min(committed[words], key=lambda other: sum(abs(a - b) for a, b in zip(values, other, strict=True)))
        if any(abs(a - b) > spread * max(abs(a), abs(b)) + 1e-9 * abs(b) for a, b in zip(values, nearest, strict=True)):
            out.append(f"    {words[:100]}: committed {nearest}, now {values}")
    return compared, out


def run(script: Script, copy: Path) -> bool:
    """Run one, and print what it did; whether nothing moved."""
    path, *arguments = script.command.split()
    begin_s, folder, theirs = time.time(), (copy / "reports" / path).parent, (ROOT / "reports" / path).parent
    command = [sys.executable, str(copy / "reports" / path), *arguments]
    done = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"FAILED   {script.command}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]}")
        return False
    pairs = [(done.stdout, "\n".join(page.read_text(encoding="utf-8") for page in theirs.glob("*.md")))]
    written = (file for file in folder.rglob("*") if file.suffix in DATA and file.stat().st_mtime > begin_s)
    pairs += [(file.read_text(encoding="utf-8"), (theirs / file.relative_to(folder)).read_text(encoding="utf-8")) for file in written]
    printed, compared, out = 0, 0, []
    for now, then in pairs:
        own = rows(line for line in now.splitlines() if now is not done.stdout or line.startswith("|"))
        count, more = moved(own, rows(then.splitlines()), script.spread)
        printed, compared, out = printed + sum(map(len, own.values())), compared + count, out + more
    verdict = "MOVED" if out else "the same" if compared else "NOTHING"
    print(
        f"{verdict:8} {script.command}: of {printed} rows {compared} are committed, {len(out)} moved; {time.time() - begin_s:.0f} s",
        *out,
        sep="\n",
    )
    return not out and compared > 0


def main() -> int:
    """Every script, or those of the folders that are named."""
    chosen = [script for script in AGAIN if len(sys.argv) < 2 or script.command.split("/")[0] in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="fleetbench-reports-") as scratch:
        copy = Path(scratch)
        shutil.copytree(ROOT / "reports", copy / "reports")
        shutil.copytree(ROOT / "examples", copy / "examples")
        results = [run(script, copy) for script in chosen]
    for name, why in ELSEWHERE.items():
        print(f"not here {name}: {why}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
