"""Modes: synchronous training and GeoSGD, measured with emulated trainers on the testbed and foretold by the simulator.

One experiment is what both execute: trainers sleep by its table of layers and its draws, and push real bytes to real servers. What
messages and servers' work cost, one trainer alone says; the rate of the links is not fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from queueing import HEADER_BYTES, SERVERS, carried_bps, mean

from fleetbench.cluster import Link
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.report.fidelity import step_errors
from fleetbench.result import RunResult, steps_table, summarise
from fleetbench.staleness import counts_of, load_of, quantiles_of, total_variation
from fleetbench.workload import HostWork
from real.job.session import Session
from real.leg import Leg
from real.testbed.testbed import LinkOff
from sim.servers.actor import Linear
from sim.servers.simulate import execute, job_of
from sim.servers.traffic import Traffic

TRAINERS = 4
QUICKER = 10
"""So many times fewer steps, where all is to be quick."""
ALONE = 3
"""... and so many times fewer for one trainer alone."""
TRIES = 3
OTHER_DRAWS = 5
"""Seeds under which a case is simulated beside its own."""
NEVER_IDLE = 1000
"""``send_wait_times`` of 10 s: K alone says when GeoSGD exchanges."""
SYNCHRONOUS = "synchronous"
BUILT = ("hosts", "rootless", "shaping", "refused", "links")
"""What is kept of the testbed."""
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mode, and so many counted steps of it."""

    name: str
    strategy: dict[str, Any]
    steps: int
    saturates: bool = False
    """Exchanges follow each other without a pause. How many steps a second there are then depends on whether trainers happen to exchange
    at once, or one pushes while another pulls, which other draws make otherwise: no single run foretells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Trainers of one size, and what they are measured in, the synchronous case among it: it says what messages and servers' work cost."""

    numbers: int
    """Dense parameters, 4 bytes each, over all servers together."""
    think_ms: int
    """Compute of a step takes 1 + X times this, X of a gamma law with mean 0.5 and a coefficient of variation of 1."""
    cases: tuple[Case, ...]


def _geo(k_steps: int, steps: int, send_wait_times: int = NEVER_IDLE, *, saturates: bool = False) -> Case:
    configs = {"k_steps": k_steps, "send_wait_times": send_wait_times}
    name = f"GeoSGD, K = {k_steps}" + ("" if send_wait_times == NEVER_IDLE else ", or idle")
    return Case(name=name, strategy={"mode": "ps", "a_sync": True, "a_sync_configs": configs}, steps=steps, saturates=saturates)


def _synchronous(steps: int) -> Case:
    return Case(name=SYNCHRONOUS, strategy={"mode": "ps"}, steps=steps)


LOADS = {
    "light": Load(numbers=10_000, think_ms=20, cases=(_synchronous(400), _geo(8, 640))),
    "heavy": Load(numbers=40_000, think_ms=40, cases=(_synchronous(240), _geo(8, 320, send_wait_times=1))),
    "bulky": Load(numbers=200_000, think_ms=40, cases=(_synchronous(90), _geo(4, 240), _geo(2, 180, saturates=True))),
}


def experiment_of(load: Load, trainers: int, seed: int, rate_bps: int) -> Experiment:
    """What is run and simulated, for ``Leg`` s of any case."""
    layer = {"name": "all", "params": load.numbers, "forward": f"{load.think_ms // 4} ms", "backward": f"{load.think_ms * 3 // 4} ms"}
    return Experiment.from_dict(
        {
            "name": "modes",
            "workload": {"model": "layers", "layers": [layer], "lr": 1e-6, "batch_size": 1},
            "cluster": {
                "nodes": trainers,
                "servers": SERVERS,
                "inter": {"bandwidth": f"{rate_bps // 10**6} Mbit/s"},
                "stragglers": [{"kind": "jitter", "distribution": "gamma", "mean": 0.5, "cv": 1.0}],
            },
            "strategy": {"mode": "ps"},
            "run": {"device": "emulated", "launcher": "testbed", "seed": seed},
        }
    )


def leg_of(case: Case, *, shorter: int = 1) -> Leg:
    """The case's steps, or a part of them that is a whole number of exchanges."""
    made = Experiment.from_dict({"cluster": {"servers": SERVERS}, "strategy": case.strategy})
    k_steps = max(1, made.strategy.a_sync_configs.k_steps) if made.strategy.a_sync else 1
    steps = max(k_steps, case.steps // shorter // k_steps * k_steps)
    return Leg(strategy=made.strategy, steps=steps, warmup_steps=2 * k_steps, start="initial")


def measure(load: Load, trainers: int, seed: int, rate_bps: int, *, shorter: int) -> dict[str, RunResult]:
    """All cases of a load in one launch, by name; a testbed with a link that is off is built again."""
    for tries_left in reversed(range(TRIES)):
        try:
            with Session(experiment_of(load, trainers, seed, rate_bps)) as session:
                return {case.name: session.run(leg_of(case, shorter=shorter)) for case in load.cases}
        except LinkOff as error:
            if not tries_left:
                raise
            print(error, flush=True)
    raise AssertionError


def simulate(real: RunResult, rate_bps: int, constants: Mapping[str, float], seed: int | None = None) -> RunResult:
    """The run's experiment on the simulated clock, under its own draws or those of another seed.

    A server's work is half for an update and half for each answer: of four synchronous pushes it reads three while it waits for the last,
    and sends four answers. A trainer's own work lies before its forward.
    """
    experiment = real.experiment
    (layer,) = experiment.workload.layers
    link = Link(bandwidth=BitsPerSecond(round(carried_bps(rate_bps))), latency=Nanoseconds(round(constants["message_ns"])), payload=True)
    host = HostWork(read=Nanoseconds(round(constants["extra_ns"])))
    believed = experiment.replace(
        cluster=dataclasses.replace(experiment.cluster, inter=link), workload=dataclasses.replace(experiment.workload, host=host)
    )
    traffic = Traffic(servers=SERVERS, dense_bytes=4 * layer.params, header_bytes=HEADER_BYTES)
    warmup_steps = 1 - int(real.steps["step"].min())
    seed = believed.run.seed if seed is None else seed
    believed = believed.replace(run=dataclasses.replace(believed.run, warmup_steps=warmup_steps, seed=seed))
    half_ns = round(constants["service_ns"] / 2)
    job = job_of(believed, traffic=traffic, costs=Linear(push_ns=half_ns, answer_ns=half_ns))
    execution = execute(job)
    table = steps_table(execution.records)
    load = {"staleness": quantiles_of(counts_of(execution.loads)), "server_load": load_of(execution.loads)}
    summary = summarise(believed, table, executor="sim", run_id="report", **load)
    return RunResult(experiment=believed, summary=summary, steps=table, plan=real.plan)


def constants_of(alone: RunResult, rate_bps: int) -> dict[str, float]:
    """What one trainer that trains synchronously says of costs.

    ``service_ns``: a server's work for a push and its answer, seldom enough in GeoSGD that echoes of beats would outweigh it.
    ``extra_ns``: see ``own_ns``. ``message_ns``: the latency of a message; the trainer waits for a push and an answer in every step, and
    the simulated one is made to wait for as long.
    """
    load = alone.summary.server_load
    assert load is not None
    service_ns = 1e9 * load["utilisation"] / load["gradients_per_s"]
    known = {"service_ns": service_ns, "extra_ns": own_ns(alone, rate_bps), "message_ns": 0.0}
    missing_s = alone.summary.exposed_comm_s - simulate(alone, rate_bps, known).summary.exposed_comm_s
    return {**known, "message_ns": max(0.0, 1e9 * missing_s / 2)}


def own_ns(alone: RunResult, rate_bps: int) -> float:
    """A trainer's own work for a step, beyond the declared compute and without waiting."""
    declared_s = simulate(alone, rate_bps, dict.fromkeys(("service_ns", "extra_ns", "message_ns"), 0.0)).summary.compute_s
    return max(0.0, 1e9 * (alone.summary.step_s["mean"] - alone.summary.exposed_comm_s - declared_s))


def row(real: RunResult, rate_bps: int, constants: Mapping[str, float]) -> Entry:
    """Measured and simulated: throughput, trainers' waiting, and, of servers, pushes and staleness.

    ``simulated_steps_per_s``: smallest and largest throughput under its own draws and ``OTHER_DRAWS`` more.
    """
    predicted = simulate(real, rate_bps, constants)
    seeds = range(real.experiment.run.seed + 1, real.experiment.run.seed + 1 + OTHER_DRAWS)
    others = [simulate(real, rate_bps, constants, seed).summary.samples_per_s for seed in seeds]
    every = [predicted.summary.samples_per_s, *others]
    errors = step_errors(predicted, real)
    found = {name: _figures(run) for name, run in (("measured", real), ("simulated", predicted))}
    histograms = [found[name]["staleness"] for name in ("simulated", "measured")]
    return {
        **found,
        "simulated_steps_per_s": [min(every), max(every)],
        "throughput_ratio": predicted.summary.samples_per_s / real.summary.samples_per_s,
        "wait_error_of_step": (_waiting_s(predicted) - _waiting_s(real)) / real.summary.step_s["mean"],
        "mean_staleness": [mean(histogram) for histogram in histograms],
        "total_variation": total_variation(*histograms),
        "step_error": errors["step"]["relative"],
    }


def _waiting_s(run: RunResult) -> float:
    """In a mean step: for the slowest trainer, where they wait for each other, and for servers."""
    return run.summary.wait_s + run.summary.exposed_comm_s


def _figures(run: RunResult) -> Entry:
    summary = run.summary
    assert summary.server_load is not None
    staleness = summary.server_load["staleness_histogram"]
    return {
        "steps_per_s": summary.samples_per_s,
        "mean_step_s": summary.step_s["mean"],
        "wait_s": _waiting_s(run),
        "pushes": sum(staleness.values()) / SERVERS,
        "staleness": staleness,
        "utilisation": summary.server_load["utilisation"],
        "bytes_sent_per_trainer": summary.bytes_sent_per_trainer,
        "late_s": summary.lateness_s,
    }


def watched(run: RunResult) -> Entry:
    """Whether a measurement counts, and the noise of every try."""
    assert run.testbed is not None
    return {"counts": run.testbed["counts"], "num_void": run.testbed["void_runs"], "blocks": run.testbed["blocks"]}


def measured_rounds(rounds: int, rate_bps: int, *, quick: bool) -> Iterator[Entry]:
    """Every load in every round: one trainer alone, then four."""
    shorter = QUICKER if quick else 1
    is_first = True
    for number in range(rounds):
        for name, load in LOADS.items():
            alone = measure(load, 1, number, rate_bps, shorter=ALONE * shorter)
            together = measure(load, TRAINERS, number, rate_bps, shorter=shorter)
            if is_first:
                built = together[SYNCHRONOUS].testbed
                assert built is not None
                yield {"part": "modes", "kind": "ground", **{key: built[key] for key in BUILT}}
                is_first = False
            known = constants_of(alone[SYNCHRONOUS], rate_bps)
            for case in load.cases:
                constants = {**known, "extra_ns": own_ns(alone[case.name], rate_bps)}
                common = {"part": "modes", "load": name, "case": case.name, "round": number, "constants": constants}
                yield {**common, "kind": "alone", "measured": _figures(alone[case.name]), **watched(alone[case.name])}
                real = together[case.name]
                found = {"saturates": case.saturates, **row(real, rate_bps, constants)}
                calibrated = all(watched(alone[behind])["counts"] for behind in (SYNCHRONOUS, case.name))
                yield {**common, "kind": "row", "calibration_counts": calibrated, **found, **watched(real)}
