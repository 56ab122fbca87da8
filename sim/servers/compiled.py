"""Compiled: a big asynchronous job by the twin, as the table of steps and the servers' loads that the reference gives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd

from fleetbench.quantities import LARGEST
from fleetbench.result import steps_table_of, uncountable
from sim.servers.job import Job
from sim.servers.load import Load
from sim.servers.twin import TwinExecution, execute_twin, stretched


def execute_compiled(job: Job) -> tuple[pd.DataFrame, tuple[Load, ...]]:
    """Run a job that the twin knows; see ``execute_twin`` for what it raises."""
    twin = execute_twin(job)
    return _table(job, twin), _loads(twin)


def _table(job: Job, twin: TwinExecution) -> pd.DataFrame:
    trainers, steps = twin.starts_ns.shape
    num = trainers * steps
    forward = stretched(job.table.forward_ns, job.draws)
    think = stretched(job.table.forward_ns + job.table.backward_ns, job.draws)
    if max(int(twin.ends_ns.max()), int(twin.bytes_sent.max())) > LARGEST:
        raise uncountable()
    frame = pd.DataFrame(
        {
            "rank": np.repeat(np.arange(trainers), steps),
            "step": np.tile(np.arange(job.steps.start, job.steps.stop), trainers),
            "start_ns": twin.starts_ns.ravel(),
            "read_ns": np.full(num, job.table.read),
            "forward_ns": forward.ravel(),
            "backward_ns": (think - forward).ravel(),
            "stall_ns": (twin.ends_ns - twin.starts_ns - think).ravel() - job.table.read,
            "update_ns": np.zeros(num, dtype=np.int64),
            "end_ns": twin.ends_ns.ravel(),
            "arrival_ns": pd.array([pd.NA], dtype="Float64").repeat(num),
            "local_steps": pd.array([pd.NA], dtype="Int64").repeat(num),
            "loss": np.full(num, np.nan),
            "bytes_sent": twin.bytes_sent.ravel(),
        }
    )
    return steps_table_of(frame)


def _loads(twin: TwinExecution) -> tuple[Load, ...]:
    loads = []
    for server, row in enumerate(twin.loads.tolist()):
        since, until, busy, length, longest, length_ns = row[:6]
        lags = np.flatnonzero(twin.staleness[server])
        loads.append(
            Load(
                since_ns=since,
                until_ns=until,
                busy_ns=busy,
                length=length,
                longest=longest,
                length_ns=length_ns,
                waits_ns=twin.waits_ns[twin.waits_ns[:, 0] == server, 1].tolist(),
                staleness=Counter({int(lag): int(twin.staleness[server, lag]) for lag in lags}),
            )
        )
    return tuple(loads)
