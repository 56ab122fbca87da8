"""Ceilings: how fast a link this machine carries, as it was calibrated, and the refusal of what is faster."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.quantities import format_bandwidth
from fleetbench.result import skip
from fleetbench.store import machine
from real.testbed.topology import Topology

_SCHEMA = 1
_FOLDER = "testbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was found at one rate."""

    rate_bps: int
    carries: bool
    why: str
    """Why it does not carry; empty where it does."""
    counts: bool = True
    """Whether the machine was quiet; a rate that failed on a busy one may be carried on a quiet one."""
    num_void: int = 0
    alpha_s: float | None = None
    residuals: dict[str, float] | None = None
    """By bytes: measured over closed form, minus one."""
    times_s: dict[str, float] | None = None
    blocks: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The highest rate that carries, on this machine, for so many hosts."""

    hosts: int
    rootless: bool
    rate_bps: int
    """0 where not even the lowest rate carried."""
    points: tuple[Point, ...]
    machine: dict[str, Any]
    taken: str
    schema: int = _SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def save(ceiling: Ceiling, root: Path) -> Path:
    """Keep a ceiling below ``root`` under a hash of the machine and the number of hosts."""
    path = _path(root, ceiling.hosts, rootless=ceiling.rootless)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ceiling.to_dict(), indent=1), encoding="utf-8")
    return path


def load(root: Path, hosts: int, *, rootless: bool) -> Ceiling | None:
    """The ceiling that was kept below ``root`` for this machine and number of hosts; none where there is none."""
    path = _path(root, hosts, rootless=rootless)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            return None
        return Ceiling(**{**data, "points": tuple(Point(**{**point, "blocks": tuple(point["blocks"])}) for point in data["points"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"not a ceiling: {error}", str(path), hint="remove it, and run `fleetbench testbed --calibrate`") from None


def require_carried(topology: Topology, root: Path, *, rootless: bool) -> tuple[Ceiling | None, list[dict[str, str]]]:
    """The known ceiling, and an entry of ``skipped`` where none is. Raises ``EnvironmentLacks`` for links above it."""
    ceiling = load(root, topology.num_hosts, rootless=rootless)
    if ceiling is None:
        why = f"not calibrated for {topology.num_hosts} hosts: only the rates of the links were checked, each and all at once"
        return None, [skip("testbed.ceiling", why)]
    if topology.fastest_host_bps > ceiling.rate_bps:
        carried = f"{format_bandwidth(ceiling.rate_bps)} at most" if ceiling.rate_bps else "none of the rates that were tried"
        raise EnvironmentLacks(
            f"this machine carries {carried} for {topology.num_hosts} hosts (calibrated {ceiling.taken})",
            "cluster.inter.bandwidth",
            format_bandwidth(topology.fastest_host_bps),
            "declare slower links, and scale compute along: only their ratio matters; or `fleetbench testbed --calibrate` again",
        )
    return ceiling, []


def this_machine() -> dict[str, Any]:
    """What a ceiling holds for."""
    return {**machine(), "usable_cores": len(os.sched_getaffinity(0))}


def _path(root: Path, hosts: int, *, rootless: bool) -> Path:
    key = json.dumps([this_machine(), hosts, rootless], sort_keys=True)
    return root / _FOLDER / f"ceiling-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
