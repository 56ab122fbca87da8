"""What every process of a job runs whose driver is inside: ``inside_job.py OUT NOTES``; rank 0 prints what its legs gave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.job.inside import driving, role_inside, serve
from real.job.script_session import ScriptSession
from real.leg import Leg

command = [sys.executable, str(Path(__file__).with_name("inside_script.py")), sys.argv[2]]
role = role_inside()
assert role is not None
base = Experiment.from_dict({"name": "mine", "run": {"environment": {"OMP_DYNAMIC": "false"}}})
if role.rank > 0:
    sys.exit(serve(role, command, base.run.environment))
small = DistributedStrategy(fuse_grad_size_in_MB=1.0)
legs = [
    Leg(strategy=DistributedStrategy(), steps=10, warmup_steps=2),
    Leg(strategy=small, steps=12, warmup_steps=2),
    Leg(strategy=small, steps=8, warmup_steps=2, start="initial"),
]
with driving(role, Path(sys.argv[1])), ScriptSession(command, base) as session:
    runs = [session.run(leg) for leg in legs]
    facts = {
        "trainers": session.experiment.cluster.trainers,
        "trainers_per_node": session.experiment.cluster.trainers_per_node,
        "hosts": session.hosts,
        "steps": [sorted(run.steps.query("step >= 1").groupby("rank").size().to_dict().items()) for run in runs],
        "strategies": [run.experiment.strategy.fuse_grad_size_in_MB for run in runs],
    }
    print(json.dumps(facts))
