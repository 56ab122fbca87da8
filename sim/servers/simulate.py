"""simulate_servers: how long an experiment with parameter servers will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from fleetbench.declared import DeclaredScalars
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.groups import world_of
from fleetbench.plan.servers.recording import in_order
from fleetbench.profile import Profile
from fleetbench.result import Outcome, RunResult, skip, steps_table, summarise
from fleetbench.store import new_run_id
from sim.servers.job import execute
from sim.servers.load import load_summary, staleness_summary
from sim.servers.scenario import job_of


def simulate_servers(
    experiment: Experiment,
    *,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
    timeline: bool = True,
) -> RunResult:
    """Execute an experiment with ``mode = "ps"`` on a simulated clock; see ``sim.run.simulate``.

    Its plan has no collectives; who tells whom what is decided by ``fleetbench.plan.servers``.
    """
    begin_s = time.perf_counter()
    job = job_of(experiment, profile)
    done = count(1)

    def step_done() -> None:
        if progress is not None:
            progress(next(done), len(job.steps))

    execution = execute(job, record=record, step_done=step_done)
    if max(record.end_ns for record in execution.records) == 0:
        raise ConfigError("the run takes no time at all", "workload.layers", hint="give the layers a forward or backward above 0 ns")
    table = steps_table(execution.records)
    scalars = DeclaredScalars.of(experiment.workload)
    found = [skip("workload.target_loss", "stale gradients do not follow a declared curve")] if experiment.workload.target_loss else []
    outcome = Outcome(
        executor="sim",
        run_id=new_run_id(),
        final_loss=scalars.declared_loss(experiment.workload.steps) if job.rules.mode == "synchronous" else None,
        skipped=found,
        staleness=staleness_summary(execution.loads),
        server_load=load_summary(execution.loads),
    )
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, table, outcome),
        steps=table,
        plan=Plan(trainers=job.rules.trainers, buckets=(), exchange=(), groups=(("world", world_of(job.rules.trainers)),)),
        spans=execution.spans if timeline else (),
        roles=in_order(execution.recordings),
        host_s=time.perf_counter() - begin_s,
    )
