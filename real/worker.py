"""Worker: one rank of a launch of an experiment. Joins, then runs the legs that the driver orders, until told to stop.

``python -m real.worker FOLDER``: the job's folder, in which ``spec.json`` is the experiment.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.config import decode
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from real.emulated.support import is_emulated
from real.job.folder import RankPlace, RankSide
from real.processes.beats import BeatWriter
from real.processes.place import Place

if TYPE_CHECKING:
    from real.communication.communicators import Communicators
    from real.leg_training import LegTraining


def main(folder: Path) -> None:
    """Run this rank until the driver says stop; an error is reported to it and ends this process with code 1."""
    rank = int(os.environ["RANK"])
    try:
        _work(RankSide(folder), rank)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever it was, the driver must learn of it
        from real.processes.failures import rank_error

        traceback.print_exc()
        with contextlib.suppress(OSError):  # the driver may have taken its folder away
            RankSide(folder).fail(rank, asdict(rank_error(error)))
        sys.stderr.flush()
        os._exit(1)  # lanes may be stuck in a collective that nobody will answer


def _work(folder: RankSide, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from real.collectives.rank import run_benchmark
    from real.communication.communicators import Communicators
    from real.communication.device import device_of
    from real.processes.joining import join_through

    spec = json.loads((folder.path / "spec.json").read_text(encoding="utf-8"))
    experiment = Experiment.from_dict(spec["experiment"])
    profile = decode(spec["profile"], Profile, "profile") if spec["profile"] else None
    cluster, run = experiment.cluster, experiment.run
    beats = BeatWriter(folder.beats, rank)
    beats.beat(-1, 0)
    torch.set_num_threads(1)
    device = device_of(run.device)
    timeout = timedelta(microseconds=run.startup_timeout // 1000)
    if spec["store"] is not None:
        join_through(spec["store"], run.backend, rank, cluster.trainers, timeout)
    else:
        dist.init_process_group(run.backend, rank=rank, world_size=cluster.trainers, timeout=timeout)
    communicators = Communicators(run.backend, timedelta(microseconds=run.timeout // 1000), device)
    communicators.barrier()
    folder.join(RankPlace(rank=rank, trainers=cluster.trainers, trainers_per_node=cluster.trainers_per_node, place=Place.here()))
    training: LegTraining | None = None
    number = 0
    while (order := folder.wait_for(number)) is not None:
        leg = order.leg
        beats.beat(number, -leg.warmup_steps)
        on_step = partial(beats.beat, number)
        if leg.collectives is not None:
            part: dict[str, Any] = {"collectives": run_benchmark(leg.collectives, communicators, on_step)}
        else:
            training = training or training_of(experiment, profile, folder.path / "data", communicators, spec["model"])
            part = training.run(leg, on_step)
        beats.beat(number, leg.steps)
        folder.finish(number, rank, part | {"complete": True, "num_steps": leg.warmup_steps + leg.steps})
        number += 1
    if training is not None:
        training.close()
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def training_of(
    experiment: Experiment, profile: Profile | None, data: Path, communicators: Communicators, model: str | None = None
) -> LegTraining:
    """What trains on the experiment's device; ``model`` names one outside the registry."""
    if is_emulated(experiment):
        from real.emulated.training import EmulatedTraining

        return EmulatedTraining(experiment, profile, communicators)
    from real.training import Training

    return Training(experiment, profile, data, communicators, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
