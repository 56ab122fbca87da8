"""Two pictures of one tuning: step times of all arms, and losses of default and finalist, simulated and real.

python reports/quickstart/pictures.py FOLDER   # of a tuning, as `make demo` prints it; writes demo.png and loss.png beside this file
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from fleetbench import load_run
from fleetbench.experiment import Experiment
from fleetbench.report import figures
from fleetbench.result import RunResult
from sim.learning.virtual_training import train
from sim.run import simulate
from tuner.recommendation import Recommendation

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    """Draw both."""
    found, experiment = Recommendation.load(folder), Experiment.load(folder / "experiment.toml")
    figures.save_png(figures.simulated_against_real(found.arms), HERE / "demo.png")
    experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str((folder / "profile.toml").resolve())))
    real = [load_run(path) for path in sorted((folder / "runs").glob("*-real-*"))]
    losses: dict[str, RunResult] = {}
    for arm in found.arms:
        if arm.name not in ("default", found.finalist):
            continue
        own = experiment.replace(strategy=arm.strategy)
        arrived = [run for run in real if run.experiment.strategy == arm.strategy and run.summary.steps_to_target is not None]
        losses[f"{arm.name}, real"] = next(run for run in arrived if run.experiment.run.seed == own.run.seed)
        learnt = train(own, until=own.workload.target_loss)  # which ends at the target, as the real run does
        own = own.replace(workload=dataclasses.replace(own.workload, steps=learnt.workload.steps))
        losses[f"{arm.name}, simulated"] = simulate(own, learnt=learnt)
    figures.save_png(figures.loss_against_time(losses, target=experiment.workload.target_loss), HERE / "loss.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
