"""Runs that are too large for the simulator: refused with a sentence before memory or time is spent, or done within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

CLUSTER = (
    "cluster.nodes=2",
    'cluster.inter={bandwidth="10 Gbit/s"}',
    'cluster.intra={bandwidth="100 Gbit/s"}',
)
BILLION = 1_000_000_000
SECONDS = 60
"""On a machine that does much else; memory is asked for at once where it is."""


def simulated(command: Callable, experiment: Callable[..., Path], tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and error of ``fleetbench sim`` on two nodes."""
    settings = [part for setting in (*CLUSTER, *(text for text in arguments if "=" in text)) for part in ("--set", setting)]
    begin_s = time.monotonic()
    ended = command("sim", experiment(), *settings, *(text for text in arguments if "=" not in text), "--out", tmp_path / "runs")
    assert time.monotonic() - begin_s < SECONDS
    return ended.code, ended.err


def layers(text: str) -> str:
    """One kind of layer."""
    return f"workload.layers=[{{name='b', forward='1 ms', backward='1 ms', {text}}}]"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((f"workload.steps={BILLION}",), "workload.steps"),
        ((f"workload.steps={1000 * BILLION}",), "workload"),
        ((f"workload.steps={BILLION}", "--engine", "reference"), "workload.steps"),
        (("workload.steps=4000000", "cluster.trainers_per_node=50", "--engine", "reference"), "workload.steps"),
        (("workload.steps=4000000", "cluster.trainers_per_node=50", "--table"), "--table"),
        ((f"run.warmup_steps={BILLION}",), "workload.steps"),
        ((f"cluster.nodes={BILLION}",), "cluster.nodes"),
        ((f"cluster.trainers_per_node={BILLION}",), "cluster.nodes"),
        (("strategy.mode=ps", f"cluster.servers={BILLION}"), "cluster.servers"),
        (("strategy.mode=ps", "cluster.servers=1", f"workload.steps={BILLION}"), "workload.steps"),
        (("strategy.mode=ps", "cluster.servers=1", f"cluster.nodes={BILLION}"), "cluster.nodes"),
        ((layers(f"params={BILLION * BILLION // 4}"),), "experiment"),
        ((layers("params=1, repeat=1000000"),), "workload.layers"),
        ((f"workload.host={{load='1 ms', loaders={BILLION}}}",), "workload.host.loaders"),
        (("cluster.inter={bandwidth='1e-30 bit/s'}",), "cluster.inter.bandwidth"),
        (("cluster.inter={bandwidth='5e-324 bit/s'}",), "cluster.inter.bandwidth"),
        (("cluster.inter={bandwidth='1 Gbit/s', latency='1000000 h'}",), "experiment"),
        (("workload.host={load='1000000 h'}",), "experiment"),
        (("cluster.racks={nodes=1, oversubscription=1e300}",), "experiment"),
        (
            (
                "cluster.stragglers=[{kind='episode',rate='0.5 /step',length='2 steps',factor=2}]",
                "workload.steps=4000000",
                "cluster.nodes=90",
            ),
            "cluster.stragglers",
        ),
    ],
)
def test_what_would_never_end_is_refused(
    command: Callable, experiment: Callable[..., Path], tmp_path: Path, arguments: tuple[str, ...], field: str
) -> None:
    """Exit code 2, the field, and a hint."""
    code, error = simulated(command, experiment, tmp_path, *arguments)
    assert code == 2
    assert error.startswith(f"error: {field}")
    assert "HINT: " in error


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "argument",
    [
        "workload.loss_curve={start=3, floor=0.1, half_life='0.001 steps'}",
        "workload.loss_curve={start=3, floor=0.1, half_life='1e-30 steps'}",
        layers("params=2500000000000000"),
        layers("params=1, repeat=2000"),
        "cluster.inter={bandwidth='1 bit/s'}",
        "cluster.inter={bandwidth='9e18 bit/s'}",
        f"cluster.nics_per_node={BILLION}",
        f"cluster.racks={{nodes={BILLION}, oversubscription=1e300}}",
        "cluster.nodes=2000",
    ],
)
def test_what_is_extreme_and_small_is_simulated(command: Callable, experiment: Callable[..., Path], tmp_path: Path, argument: str) -> None:
    """A curve that is at its floor at once, petabytes, a bit a second, more interfaces than bytes: none of them is many events."""
    assert simulated(command, experiment, tmp_path, argument, "run.warmup_steps=5") == (0, "")
