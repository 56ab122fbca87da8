"""A driver on a local Ray of two nodes: what it finds here and there, as JSON. ``test_sim_ray`` runs it and looks.

With ``RAY_ADDRESS`` the package connects to this cluster as to any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

import ray
from ray.cluster_utils import Cluster
from sim_cases import layered, link
from tuner_fakes import layers_experiment

import tuner.search
from fleetbench import Experiment, over_seeds, sweep, what_if
from fleetbench.config import encode
from fleetbench.errors import ConfigError, FleetbenchError
from fleetbench.experiment import apply_override
from fleetbench.stragglers import Jitter, SlowRank
from sim.learning.prepared import one_thread
from sim.learning.virtual_training import VirtualTraining
from sim.many.pool import Job, Where, run_all, started
from sim.many.training import trained
from tuner.calibrate.cells import Cell
from tuner.calibrate.fit import calibrate
from tuner.search import search, shortened
from tuner.simulated.candidates import step_time
from tuner.space import search_space

STRAGGLERS = (Jitter(distribution="exponential", mean=0.3), SlowRank(ranks=(1,), factor=1.5))


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Two nodes of a core each, on loopback."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = nodes.address
        yield nodes
    finally:
        nodes.shutdown()


def points(on: Where) -> str:
    """A sweep's table, to the last bit."""
    experiment = layered([(250, 100, 200)], nodes=4, inter=link(8, 10), steps=200, stragglers=STRAGGLERS)

    def load(more: list[str]) -> Experiment:
        data = encode(experiment)
        for override in more:
            apply_override(data, override)
        return Experiment.from_dict(data)

    return sweep(load, ["run.seed=0..99"], on=on, processes=1).table.to_json(double_precision=15)


def seeds(on: Where) -> str:
    """Summaries of seeds, without the names of their runs."""
    experiment = layered([(250, 100, 200)], nodes=4, inter=link(8, 10), steps=20, stragglers=STRAGGLERS)
    return repr(over_seeds(experiment, 8, on=on, processes=1).intervals)


def cases(on: Where) -> str:
    """Gains of the cases of what-if."""
    experiment = layered([(250, 100, 200)], nodes=4, inter=link(8, 10), steps=20, stragglers=STRAGGLERS)
    return repr([(case.name, case.gain, case.summary.wall_s) for case in what_if(experiment, on=on, processes=1)])


def plans(on: Where) -> str:
    """Times of a search by the simulator."""
    experiment = layers_experiment(
        trials=500, nccl_comm_num=(1, 2, 3, 4), fuse_grad_size_in_MB=(0.25, 0.5, 1.0, 1.2, 2.0, 4.0), fusion=("off", "optimal")
    )
    found = search(experiment, search_space(experiment), None, out=Path("unused"), step_s=step_time(shortened(experiment)), on=on)
    assert len(found.tried) > tuner.search.PROBED
    return repr([(one.key, one.simulated_s) for one in found.tried])


def fitted(on: Where) -> str:
    """Errors of the fits without one cell."""
    experiment = layered([(250_000, 10**6, 2 * 10**6)], nodes=2, inter=link(8, 10_000), steps=4)
    cells = [Cell(where=f"{nodes}", settings={"cluster.nodes": f"{nodes}"}, seconds=0.003 + 0.0004 * nodes) for nodes in range(2, 8)]
    return repr(calibrate(experiment, cells, ["cluster.inter.bandwidth", "compute"], on=on).errors_left_out)


def learnt(on: Where) -> str:
    """Losses of virtual trainers, whose gradients are computed in a loop: which way is faster, a clock decides."""
    experiment = Experiment.from_dict({"workload": {"model": "digits_mlp", "steps": 20}, "cluster": {"trainers_per_node": 2}})

    def learn(own: Experiment) -> Any:
        with one_thread(), tempfile.TemporaryDirectory() as folder:
            return VirtualTraining(own, Path(folder), way="loop").run()

    jobs = [Job(label=f"lr {lr}", experiment=_with_lr(experiment, lr)) for lr in (0.1, 0.1, 0.2)]
    found = [job.learnt for job in trained(jobs, learn, on)]
    assert found[0] is found[1]
    return repr([(one.final_loss, one.losses.tolist()) for one in found if one is not None])


def _with_lr(experiment: Experiment, lr: float) -> Experiment:
    return experiment.replace(workload=dataclasses.replace(experiment.workload, lr=lr))


def refused(on: Where) -> str:
    """An error's kind and text."""
    try:
        run_all(_below_5, range(10), labels=[f"item {number}" for number in range(10)], on=on)
    except FleetbenchError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _below_5(number: int) -> int:
    if number == 5:
        raise ConfigError("is too large", "here", f"{number}", "try 4")
    return number


def _node(_: int) -> str:
    time.sleep(0.5)  # longer than the second node takes to start a worker, in all
    return ray.get_runtime_context().get_node_id()


def _dies_once(folder: Path, number: int) -> int:
    """Three numbers kill their worker, the first time."""
    if number in (7, 23, 41):
        with contextlib.suppress(FileExistsError):
            (folder / f"{number}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return -number


def struck() -> dict[str, Any]:
    """Workers are killed while they compute; every result is there."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(partial(_dies_once, Path(folder)), range(60), on="ray")
        return {"numbers": found, "killed": len(list(Path(folder).iterdir()))}


def main() -> None:
    """Run all, and print what was found."""
    tuner.search._WORTH_OTHERS_S = 0.0
    pairs: list[Callable[[Where], str]] = [points, seeds, cases, plans, fitted, learnt, refused]
    before = dict(os.environ)
    with cluster():
        environment = dict(os.environ)
        with started("ray"):
            found: dict[str, Any] = {one.__name__: [one("local"), one("ray")] for one in pairs}
            found["nodes"] = len(set(run_all(_node, range(20), on="ray")))
            found["struck"] = struck()
        found["connected"] = ray.is_initialized()
        found["environment"] = dict(os.environ) == environment
    os.environ.clear()
    os.environ.update(before)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
