"""Worker: one rank of a launch. Joins, then runs the legs that the driver writes, until told to stop.

``python -m real.worker FOLDER``. Everything between driver and workers is a file below FOLDER:
``spec.json``, ``legs/N.json`` (written by the driver), ``results/N/rankR.json`` and
``errors/rankR.json`` (written by the ranks), ``heartbeats``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.config import decode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from real.emulated.support import is_emulated
from real.leg import Leg
from real.processes.diagnosis import RankError
from real.processes.heartbeat import Heartbeats

if TYPE_CHECKING:
    from real.communication.communicators import Communicators
    from real.leg_training import LegTraining

JOINED = 1
"""Step of leg -1 once all ranks have met."""
_POLL_S = 0.005


def main(folder: Path) -> None:
    """Run this rank until the driver says stop; an error is reported in ``errors/`` and ends it with code 1."""
    rank = int(os.environ["RANK"])
    try:
        _work(folder, rank)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever it was, the driver must learn of it
        traceback.print_exc()
        write_json(folder / "errors" / f"rank{rank}.json", asdict(_report(error)))
        sys.stderr.flush()
        os._exit(1)  # lanes may be stuck in a collective that nobody will answer


def _report(error: BaseException) -> RankError:
    from real.processes.failures import CollectiveFailed

    arguments = list(error.args) if isinstance(error, ConfigError) else None
    return RankError(f"{type(error).__name__}: {error}", isinstance(error, CollectiveFailed), time.monotonic_ns(), arguments)


def _work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from real.collectives.rank import run_benchmark
    from real.communication.communicators import Communicators
    from real.communication.device import device_of
    from real.processes.joining import join_through

    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    experiment = Experiment.from_dict(spec["experiment"])
    profile = decode(spec["profile"], Profile, "profile") if spec["profile"] else None
    trainers = experiment.cluster.trainers
    heartbeats = Heartbeats(folder / "heartbeats", trainers)
    heartbeats.beat(rank, -1, 0)
    torch.set_num_threads(1)
    run = experiment.run
    device = device_of(run.device)
    timeout = timedelta(microseconds=run.startup_timeout // 1000)
    if spec["store"] is not None:
        join_through(spec["store"], run.backend, rank, trainers, timeout)
    else:
        dist.init_process_group(run.backend, rank=rank, world_size=trainers, timeout=timeout)
    communicators = Communicators(run.backend, timedelta(microseconds=run.timeout // 1000), device)
    communicators.barrier()
    heartbeats.beat(rank, -1, JOINED)
    training: LegTraining | None = None
    number = 0
    while (text := _next_leg(folder, number)) is not None:
        leg = decode(text, Leg, "leg")
        heartbeats.beat(rank, number, -leg.warmup_steps)
        on_step = partial(heartbeats.beat, rank, number)
        if leg.collectives is not None:
            result: Any = {"collectives": run_benchmark(leg.collectives, communicators, on_step)}
        else:
            training = training or _training(experiment, profile, folder / "data", communicators, spec["model"])
            result = training.run(leg, on_step)
        heartbeats.beat(rank, number, leg.steps)
        write_json(folder / "results" / str(number) / f"rank{rank}.json", result)
        number += 1
    if training is not None:
        training.close()
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def _training(experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators, model: str | None) -> LegTraining:
    """What trains on the experiment's device; ``model`` names one outside the registry."""
    if is_emulated(experiment):
        from real.emulated.training import EmulatedTraining

        return EmulatedTraining(experiment, profile, communicators)
    from real.training import Training

    return Training(experiment, profile, data, communicators, model)


def _next_leg(folder: Path, number: int) -> Any:
    """Leg ``number`` once the driver has written it; none when it says stop instead."""
    leg, stop = folder / "legs" / f"{number}.json", folder / "legs" / "stop"
    while True:
        if leg.exists():
            return json.loads(leg.read_text(encoding="utf-8"))
        if stop.exists():
            return None
        time.sleep(_POLL_S)


def write_json(path: Path, data: Any, *, parents: bool = True) -> None:
    """Write JSON so that a reader sees all of it or nothing. Without ``parents``, at most the file's own folder is made."""
    path.parent.mkdir(parents=parents, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
