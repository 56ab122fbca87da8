"""Legs: the real runs of an environment, in one launch, every strategy twice, in turns and back.

The order is A B C ... C B A, so that a slow drift of the machine is the same for all, and the two legs of a strategy are
its A/A pair.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from files import Entry, Files, append, now, read
from grid import WARMUP, Effort, Environment
from predict import measures
from quiet import await_quiet

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from fleetbench.result import RunResult
from real.job.session import Session
from real.leg import Leg

LAUNCHES = 4
"""Of one environment at most: a worker that fails, or a link that is off, costs one."""
Turn = tuple[str, int]
"""Strategy, and which of its legs."""


@dataclass(frozen=True, slots=True)
class _Measuring:
    """What legs of one environment have in common."""

    files: Files
    environment: Environment
    cells: Entry
    """As predicted, by strategy."""
    digest: str
    effort: Effort


def run_environment(files: Files, environment: Environment, cells: Entry, digest: str, effort: Effort) -> None:
    """Measure what is not measured yet; every leg is on disk before the next one starts."""
    measuring = _Measuring(files, environment, cells, digest, effort)
    pending = _pending(files, environment, digest)
    for number in range(LAUNCHES):
        if not pending:
            return
        await_quiet(effort.patience_s)
        begin = time.monotonic()
        try:
            first = pending[0][0]
            with Session(environment.experiment(environment.strategies[first], cells[first]["steps"])) as session:
                _append(measuring, {"kind": "launch", "number": number, "took_s": round(time.monotonic() - begin, 1)})
                _run_pending(measuring, session, pending)
        except (WorkerFailed, ConfigError, EnvironmentLacks) as error:
            turn = pending.pop(0) if pending and not isinstance(error, EnvironmentLacks) else None
            entry = {"kind": "failed", "turn": turn, "error": f"{type(error).__name__}: {error}"}
            _append(measuring, entry)
            print(environment.name, entry, flush=True)


def _run_pending(measuring: _Measuring, session: Session, pending: list[Turn]) -> None:
    """Run legs and take them from the list; one that stays void gets a place behind all others, once."""
    environment, again = measuring.environment, set[Turn]()
    while pending:
        name, index = turn = pending[0]
        begin = time.monotonic()
        result = session.run(Leg(strategy=environment.strategies[name], steps=measuring.cells[name]["steps"], warmup_steps=WARMUP))
        entry = _entry(result, measuring.effort) | {"took_s": round(time.monotonic() - begin, 2)}
        _append(measuring, {"kind": "leg", "predictions": measuring.digest, "strategy": name, "leg": index} | entry)
        pending.pop(0)
        if not entry["counts"] and turn not in again:
            again.add(turn)
            pending.append(turn)
        print(
            f"{environment.name} | {name} | {index}: {1e3 * entry['wall_s'] / entry['steps']:.1f} ms a step, {entry['took_s']:.1f} s"
            f"{'' if entry['counts'] else ', VOID: ' + '; '.join(entry['void'][-1])}",
            flush=True,
        )
        if not entry["counts"]:
            await_quiet(measuring.effort.patience_s)


def _pending(files: Files, environment: Environment, digest: str) -> list[Turn]:
    done = {
        (entry["strategy"], entry["leg"])
        for entry in read(files.raw)
        if entry["kind"] == "leg" and entry["environment"] == environment.name and entry["predictions"] == digest and entry["counts"]
    }
    names = list(environment.strategies)
    turns = [(name, 0) for name in names] + [(name, 1) for name in reversed(names)]
    return [turn for turn in turns if turn not in done]


def _entry(result: RunResult, effort: Effort) -> dict[str, Any]:
    summary = dataclasses.asdict(result.summary)
    blocks = (result.testbed or {}).get("blocks", [])
    testbed = summary["testbed"] or {"counts": False}
    return {
        "steps": summary["steps"],
        **measures(result),
        "plan": result.plan.digest,
        "lateness_s": summary["lateness_s"],
        "counts": testbed["counts"] or not effort.needs_quiet,
        "void": [block["void"] for block in blocks if block["void"]],
        "testbed": testbed,
        "sentinels_s": [[block["sentinel_before_s"], block["sentinel_after_s"]] for block in blocks],
    }


def _append(measuring: _Measuring, entry: Entry) -> None:
    append(measuring.files.raw, {"at": now(), "environment": measuring.environment.name} | entry)
