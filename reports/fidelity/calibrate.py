"""Calibration: the link of a place, fitted in the training loop to runs of two strategies without stragglers.

These are legs of ``fleetbench profile``: ``whole`` (synchronous, all gradients in one bucket) and ``queued`` (Local SGD with
K = 2, a bucket a gradient). Its third one, on two communicators, is left out: what several in flight do to each other is
predicted here, not fitted.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from files import Entry, Files, append, now, read
from grid import INSIDE, NETWORK, Effort, Environment, Place
from quiet import await_quiet

from fleetbench.cluster import Link
from fleetbench.config import decode, encode
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.profile import Communication, Profile
from fleetbench.result import RunResult
from fleetbench.store import machine
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.profile import measuring as profile_legs
from real.profile.costs import fit_points, points_of
from real.profile.measuring import Legs
from real.testbed import noise

TRIES = 3
_PLAIN = DistributedStrategy()


def needed(environments: tuple[Environment, ...]) -> list[Place]:
    """The places to calibrate, each once."""
    places = dict.fromkeys(environment.calibrated_at for environment in environments)
    inside = [INSIDE] if any(place.per_node > 1 for place in places) else []
    return [*places, *inside]


def calibrate(files: Files, environments: tuple[Environment, ...], effort: Effort) -> None:
    """Calibrate what is not calibrated yet; one launch a place."""
    known = {entry["place"] for entry in read(files.calibrations) if entry["counts"]}
    for place in needed(environments):
        if place.name in known:
            continue
        for _ in range(TRIES):
            await_quiet(effort.patience_s)
            entry = _measured(place, effort)
            append(files.calibrations, entry)
            link = entry["communication"]["link"]
            print(
                f"calibrated {place.name}: latency {link['latency']}, bandwidth {link['bandwidth']}, "
                f"largest residual {100 * entry['communication']['largest_residual']:.1f} %, {entry['took_s']:.0f} s"
                f"{'' if entry['counts'] else ', VOID: ' + str(entry['void'])}",
                flush=True,
            )
            if entry["counts"]:
                break


def links_of(files: Files, place: Place) -> tuple[Link | None, Profile]:
    """The way inside a node, where there is one, and the profile that knows the link between nodes: the last ones that count.

    Raises ``SystemExit`` where they are missing.
    """
    found = {entry["place"]: entry["communication"] for entry in read(files.calibrations) if entry["counts"]}
    missing = [name for name in (place.name, *([INSIDE.name] if place.per_node > 1 else [])) if name not in found]
    if missing:
        raise SystemExit(f"no calibration that counts of {', '.join(missing)} (--stage calibrate)")
    inside = decode(found[INSIDE.name], Communication, INSIDE.name).link if place.per_node > 1 else None
    between = decode(found[place.name], Communication, place.name)
    host = machine()
    where = f"{host['processor']}, {host['cores']} cores, {host['system']}"
    return inside, Profile(machine=where, created=now(), tables=(), communication=between)


def _measured(place: Place, effort: Effort) -> Entry:
    begin = time.monotonic()
    environment = Environment(name=place.name, place=place, strategies={}, workload=NETWORK)
    experiment = environment.experiment(profile_legs.whole(_PLAIN), steps=1)
    before = noise.read({})
    with Session(experiment) as session:
        legs = Legs(session, effort.calibration_s, lambda: None)
        whole = legs.run("whole", profile_legs.whole(_PLAIN))
        queued = legs.run("queued", profile_legs.queued(_PLAIN, "sgd"))
        foreign = noise.between(before, noise.read({})).foreign_cores  # while the workers are there to be counted as ours
    points = points_of(whole, queued)
    hockney = fit_points(points, place.trainers)
    communication = Communication(
        backend="gloo",
        trainers=place.trainers,
        link=hockney.link,
        between="nodes" if place.nodes > 1 else "trainers",
        points=points,
        largest_residual=round(hockney.line.largest_residual, 4),
    )
    void = [reason for result in (whole, queued) for reason in _void(result)]
    if place.nodes == 1 and foreign > FOREIGN_LIMIT:
        void.append(f"other processes took {100 * foreign:.0f} % of a core")
    return {
        "kind": "calibration",
        "place": place.name,
        "at": now(),
        "took_s": round(time.monotonic() - begin, 1),
        "counts": not void or not effort.needs_quiet,
        "void": void,
        "foreign_cores": round(foreign, 3),
        "alpha_s": hockney.line.intercept,
        "communication": encode(communication),
        "legs": {name: _short(result) for name, result in (("whole", whole), ("queued", queued))},
    }


def _void(result: RunResult) -> list[str]:
    """Reasons why a leg does not count."""
    return [entry["why"] for entry in result.summary.skipped if entry["what"] == "testbed.quiet"]


def _short(result: RunResult) -> dict[str, Any]:
    summary = dataclasses.asdict(result.summary)
    names = ("steps", "wall_s", "compute_s", "wait_s", "exposed_comm_s", "update_s", "other_s", "lateness_s", "testbed")
    return {name: summary[name] for name in names}
