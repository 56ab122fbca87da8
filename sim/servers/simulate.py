"""simulate_servers: how long an experiment with parameter servers will take.

Two engines:

- ``reference``: event by event, on SimPy's clock; every experiment. ``auto`` is this one.
- ``compiled``: the twin, for big asynchronous jobs, hundreds of times as fast. Every connection has a link of its
  own there: trainers that push at once do not take parts of a server's link from each other.

A run's ``engine`` says which it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import pandas as pd

from fleetbench.declared import DeclaredScalars
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan
from fleetbench.plan.groups import world_of
from fleetbench.plan.servers.recording import RoleRecording, in_order
from fleetbench.profile import Profile
from fleetbench.result import MOST_ROWS, STEPS_FILE, Outcome, RunResult, no_steps, skip, steps_table, summarise, takes_no_time
from fleetbench.store import new_run_id
from fleetbench.timeline import MOST_EVENTS as MOST_SPANS
from fleetbench.timeline import TIMELINE_FILE, Span
from sim.limits import MOST_EVENTS, at_most, refuse_large
from sim.scenario import not_realised
from sim.servers.job import Job, execute
from sim.servers.load import Load, load_summary, staleness_summary
from sim.servers.scenario import job_of
from sim.spans import too_many

SERVER_ENGINES = ("auto", "reference", "compiled")
_LINKS_APART = (
    "every connection has a link of its own: nobody takes a part of another's, so the run comes out too short, and its throughput "
    "too high, wherever links bound it; --engine reference shares them"
)
_ROWS_ALIKE = (
    "which rows steps touch is not drawn: those of several steps are counted as if all rows were alike, which is too many where few "
    "rows are frequent, as in a text; what is sent comes out too large"
)
_PARTS = ("forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What an engine saw."""

    engine: str
    table: pd.DataFrame
    loads: Sequence[Load]
    spans: tuple[Span, ...] = ()
    roles: tuple[RoleRecording, ...] = ()
    skipped: tuple[dict[str, str], ...] = ()


def simulate_servers(
    experiment: Experiment,
    *,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
    timeline: bool = True,
    engine: str = "auto",
    table: bool | None = None,
) -> RunResult:
    """Execute an experiment with ``mode = "ps"`` on a simulated clock; see ``sim.run.simulate``.

    Its plan has no collectives; who tells whom what is decided by ``fleetbench.plan.servers``. Raises ``ConfigError`` for
    an engine that does not know the job, too, and ``EnvironmentLacks`` for the compiled one without numba.
    """
    begin_s = time.perf_counter()
    if engine not in SERVER_ENGINES:
        what = 'does not go with strategy.mode = "ps", whose servers and trainers are simulated event by event'
        raise ConfigError(what, "engine", repr(engine), f"one of {', '.join(SERVER_ENGINES)}")
    refuse_large(experiment)
    rank_steps = experiment.cluster.trainers * (experiment.workload.steps + experiment.run.warmup_steps)
    at_most(rank_steps, MOST_EVENTS, "steps of ranks", "workload.steps", "fewer steps or trainers")
    job = job_of(experiment, profile)
    if engine == "compiled":
        seen = _compiled(job, record=record, timeline=timeline)
        if progress is not None:
            progress(len(job.steps), len(job.steps))
    else:
        seen = _by_reference(job, progress, record=record, timeline=timeline)
    if not (seen.table["start_s"].any() or seen.table[list(_PARTS)].any(axis=None)):
        raise takes_no_time()
    scalars = DeclaredScalars.of(experiment.workload)
    keeps = len(seen.table) <= MOST_ROWS if table is None else table
    found = [*not_realised(experiment), *seen.skipped]
    if job.traffic.tables and (job.rules.mode == "geo_sgd" or job.rules.max_merge > 1):
        found.append(skip("workload.data", _ROWS_ALIKE))
    if not keeps and table is None:
        found.append(skip(STEPS_FILE, f"{len(seen.table):,} rows, and above {MOST_ROWS:,} they are written only when asked: --table"))
    outcome = Outcome(
        executor="sim",
        engine=seen.engine,
        run_id=new_run_id(),
        final_loss=scalars.declared_loss(experiment.workload.steps) if job.rules.mode == "synchronous" else None,
        skipped=found,
        staleness=staleness_summary(seen.loads),
        server_load=load_summary(seen.loads),
    )
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, seen.table, outcome),
        steps=seen.table if keeps else no_steps(),
        plan=Plan(trainers=job.rules.trainers, buckets=(), exchange=(), groups=(("world", world_of(job.rules.trainers)),)),
        spans=seen.spans,
        roles=seen.roles,
        host_s=time.perf_counter() - begin_s,
    )


def _by_reference(job: Job, progress: Callable[[int, int], None] | None, *, record: bool, timeline: bool) -> _Seen:
    done = count(1)

    def step_done() -> None:
        if progress is not None:
            progress(next(done), len(job.steps))

    execution = execute(job, record=record, step_done=step_done)
    has_room = len(execution.spans) <= MOST_SPANS
    return _Seen(
        engine="reference",
        table=steps_table(execution.records),
        loads=execution.loads,
        spans=execution.spans if timeline and has_room else (),
        roles=in_order(execution.recordings),
        skipped=() if has_room or not timeline else (skip(TIMELINE_FILE, too_many(f"{len(execution.spans):,}", MOST_SPANS)),),
    )


def _compiled(job: Job, *, record: bool, timeline: bool) -> _Seen:
    if record:
        raise ConfigError("the compiled engine records nothing", "record", "True", 'engine = "reference"')
    from sim.servers.twin import execute_compiled  # which nobody else needs

    skipped = [skip(TIMELINE_FILE, "the compiled engine keeps no events")] if timeline else []
    engine = "compiled"
    if set(job.hosts.servers) - set(job.hosts.trainers) or len(set(job.hosts.trainers)) > 1:
        skipped.append(skip("cluster.inter", _LINKS_APART))
        engine = "compiled: every connection has a link of its own"
    table, loads = execute_compiled(dataclasses.replace(job, hosts=dataclasses.replace(job.hosts, apart=True)))
    return _Seen(engine=engine, table=table, loads=loads, skipped=tuple(skipped))
