"""Is what is simulated the same before and after a change of the code, to the nanosecond?

    python reports/redesign/same_results.py write OUT.jsonl [COUNT]   # in a checkout: a line a case, with a digest of its steps
    python reports/redesign/same_results.py compare BEFORE.jsonl AFTER.jsonl

Cases: COUNT random experiments of ``tests/engine_cases.py`` (1,000 where not said), each by the engine that is chosen for it; the declared
examples; the cells of ``reports/fidelity``; and jobs on parameter servers of every mode. A refusal counts with its message.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fidelity"))

from engine_cases import Case, case_of, outcome

from fleetbench import Experiment
from fleetbench.errors import FleetbenchError
from fleetbench.result import RunResult
from fleetbench.store import commit

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("wall_s", "bytes_sent_per_trainer", "num_syncs", "time_to_target_s", "final_loss")
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"a_sync": False},
    "asynchronous": {"a_sync": True, "a_sync_configs": {"k_steps": 0}},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 3}},
}


def cases(count: int) -> Iterator[tuple[str, Case]]:
    """All cases but those of fidelity, by name."""
    for seed in range(count):
        yield f"random {seed}", case_of(seed)
    yield "sixty_four_gpus", Case(experiment=Experiment.load(ROOT / "examples" / "sixty_four_gpus.toml"))
    for mode, fields in MODES.items():
        for trainers, servers in ((1, 1), (3, 2), (8, 2)):
            yield f"{mode}, {trainers} trainers, {servers} servers", Case(experiment=served(trainers, servers, fields))


def served(trainers: int, servers: int, strategy: dict[str, Any]) -> Experiment:
    """Trainers that are late now and then, on parameter servers."""
    workload = {
        "model": "layers",
        "layers": [{"name": "block", "params": 100_000, "forward": "1 ms", "backward": "2 ms", "repeat": 10}],
        "steps": 20,
    }
    cluster = {
        "nodes": trainers,
        "servers": servers,
        "inter": {"bandwidth": "8 Gbit/s", "latency": "10 us"},
        "stragglers": [{"kind": "jitter", "mean": 0.2}],
    }
    return Experiment.from_dict({"name": "served", "workload": workload, "cluster": cluster, "strategy": {"mode": "ps", **strategy}})


def told(found: RunResult | FleetbenchError) -> dict[str, Any]:
    """What is compared of a run, or of a refusal."""
    if isinstance(found, FleetbenchError):
        return {"refused": f"{type(found).__name__}: {found}"}
    steps = hashlib.sha256(found.steps.to_csv(float_format="%.17g").encode()).hexdigest()
    return {"steps": steps, "rows": len(found.steps), "figures": [getattr(found.summary, name) for name in FIGURES]}


def fidelity() -> Iterator[tuple[str, dict[str, Any]]]:
    """The cells of ``reports/fidelity``, as they would be predicted now."""
    from files import Files
    from grid import environments, regimes
    from predict import predict

    folder = ROOT / "reports" / "fidelity"
    predicted = predict(Files(folder=folder), (*environments(), *regimes()), leg_s=4.0)
    for environment, found in predicted["environments"].items():
        for name, cell in found["cells"].items():
            cell.pop("by", None)
            yield f"fidelity: {environment}, {name}", {"cell": hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()}


def write(out: Path, count: int) -> None:
    """A line for the commit, then a line a case."""
    with out.open("w", encoding="utf-8") as file:
        print(json.dumps({"commit": commit()}), file=file)
        for name, case in cases(count):
            print(json.dumps({"case": name, **told(outcome(case, "auto"))}), file=file, flush=True)
        for name, cell in fidelity():
            print(json.dumps({"case": name, **cell}), file=file)


def compare(before: Path, after: Path) -> int:
    """Print how many cases are the same, and name those that are not; 1 where there are any."""
    one, two = ({line["case"]: line for line in map(json.loads, path.open(encoding="utf-8")) if "case" in line} for path in (before, after))
    differ = [name for name in one if one[name] != two.get(name)]
    refused = sum("refused" in line for line in one.values())
    print(f"{len(one)} cases, {refused} of them refused: {len(one) - len(differ)} are the same")
    for name in differ:
        print(f"{name}:\n  before {one[name]}\n  after  {two.get(name)}")
    return int(bool(differ))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path, *number]:
            write(Path(path), int(number[0]) if number else 1000)
        case ["compare", one, two]:
            sys.exit(compare(Path(one), Path(two)))
        case _:
            sys.exit(__doc__)
