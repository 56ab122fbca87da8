"""Straggler traces of two production jobs: are other steps as those that blocks are drawn from, and what would be gained.

Run from the repository's root: ``python reports/straggler_traces/analyse.py``. Writes ``blocks.json`` and prints its tables. Of the
sampled steps of a job one half is fitted, and the other half held out: every second step, or the later ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment, Run
from fleetbench.fitting.stragglers import fit_stragglers
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import machine, versions
from fleetbench.stragglers import ONE, Blocks, Straggler, draws
from fleetbench.workload import LayerSpec, Workload
from sim.many.what_if import what_if

HERE = Path(__file__).parent
JOBS = ("one_slow_worker", "long_last_stage")
DRAWN = 20_000
SHARES = (0.5, 0.95)
COMPUTE = ("forward-compute", "backward-compute")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """One stage's data-parallel group of a job."""

    job: str
    stage: int
    times_s: Floats
    exchange_s: float
    """Reduce-scatter of gradients and all-gather of parameters: the shortest over the ranks, median over every second step."""
    forward_share: float


def main() -> None:
    """All groups of both jobs."""
    rows = [row_of(group) for job in JOBS for group in read(job)]
    pipelines = {job: counterfactual(job) for job in JOBS}
    data = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine(), "versions": versions(), "groups": rows, "pipelines": pipelines}
    (HERE / "blocks.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    print(tables(rows, pipelines))


def read(job: str) -> list[Group]:
    """The groups of a job's stages."""
    frame = pd.read_parquet(HERE / "data" / f"{job}.parquet")
    groups = []
    for stage in sorted(int(number) for number in frame["stage"].unique()):
        computes = frame[(frame["stage"] == stage) & frame["optype"].isin(COMPUTE)].astype({"duration": "float64"})
        times = computes.groupby(["dp_rank", "step"], observed=True)["duration"].sum().unstack("step")  # noqa: PD010  # a series has no pivot_table
        own = frame[(frame["stage"] == stage) & frame["step"].isin(times.columns[::2])]
        exchange = own[own["optype"].isin(("grads-reduce-scatter", "params-all-gather"))]
        shortest = exchange.groupby(["step", "optype"], observed=True)["duration"].min().groupby("step").sum()
        compute = own[own["optype"].isin(COMPUTE)].groupby("optype", observed=True)["duration"].sum()
        groups.append(
            Group(
                job=job,
                stage=stage,
                times_s=times.to_numpy(),
                exchange_s=float(shortest.median()),
                forward_share=float(compute["forward-compute"] / compute.sum()),
            )
        )
    return groups


def row_of(group: Group) -> dict[str, Any]:
    """What is reported of a group."""
    half = group.times_s.shape[1] // 2
    alternating, in_order = ((group.times_s[:, ::2], group.times_s[:, 1::2]), (group.times_s[:, :half], group.times_s[:, half:]))
    fit = fit_stragglers(alternating[0])
    return {
        "job": group.job,
        "stage": group.stage,
        "rank_factors": fit.rank_factors,
        "statements": fit.statements,
        "alternating": errors(*alternating),
        "in_order": errors(*in_order),
        "what_if_replayed": replayed(group, alternating[1]),
        "what_if_drawn": simulated(group, fit.entries, fit.base * 1e-9, steps=1000),
    }


def errors(fitted_s: Floats, held_out_s: Floats) -> dict[str, float]:
    """Drawn over held-out compute, minus one: of a rank's step and of the slowest rank's, at 50 and 95 %."""
    fit = fit_stragglers(fitted_s)
    ranks = len(fitted_s)
    drawn = fit.base * 1e-9 * (1 + draws(fit.entries, 0, ranks, ranks, 1, DRAWN) / ONE)
    found = {}
    for name, of in (("rank", np.ravel), ("slowest", lambda times: times.max(axis=0))):
        ratios = np.quantile(of(drawn), SHARES) / np.quantile(of(held_out_s), SHARES) - 1
        found |= {f"{name}_p{100 * share:.0f}": float(ratio) for share, ratio in zip(SHARES, ratios, strict=True)}
    return found


def replayed(group: Group, times_s: Floats) -> dict[str, float]:
    """Gains of the group's what-ifs with these steps replayed."""
    base_s = float(times_s.min())
    whole = Blocks(values=tuple(map(tuple, (times_s / base_s - 1).tolist())), block_steps=times_s.shape[1])
    return simulated(group, (whole,), base_s, steps=times_s.shape[1])


def simulated(group: Group, entries: tuple[Straggler, ...], base_s: float, steps: int) -> dict[str, float]:
    """The group by itself: a node a rank, one layer, and an exchange that takes what the trace's takes when nobody is late."""
    ranks = len(group.times_s)
    base_ns, forward_ns = round(base_s * 1e9), round(base_s * 1e9 * group.forward_share)
    link = Link(bandwidth=BitsPerSecond(10**15), latency=Nanoseconds(round(group.exchange_s * 1e9 / (2 * (ranks - 1)))))
    layer = LayerSpec(name="stage", params=1, forward=Nanoseconds(forward_ns), backward=Nanoseconds(base_ns - forward_ns))
    experiment = Experiment(
        name=f"{group.job}-{group.stage}",
        workload=Workload(model="layers", layers=(layer,), steps=steps),
        cluster=Cluster(nodes=ranks, inter=link, stragglers=entries),
        run=Run(warmup_steps=0),
    )
    return {case.name: case.gain for case in what_if(experiment)} | {"step_s": what_if(experiment)[0].summary.step_s["mean"]}


def counterfactual(job: str) -> dict[str, Any]:
    """What the trace itself says of whole pipelines: each is by itself until gradients are reduced at the end of a step.

    A step that took T would have taken T - (A - A') without its last pipeline, where A is when the last pipeline is ready for
    that, and A' when the last of the others is. No simulator has a part in it.
    """
    frame = pd.read_parquet(HERE / "data" / f"{job}.parquet")
    frame = frame.assign(end=frame["start_ts"].astype("float64") + frame["duration"].astype("float64"))
    begin = frame.groupby("step")["start_ts"].min().astype("float64")
    took = frame.groupby("step")["end"].max() - begin
    backward = frame[frame["optype"] == "backward-compute"]
    ready = backward.groupby(["step", "dp_rank"])["end"].max().unstack("dp_rank").sub(begin, axis=0)  # noqa: PD010  # a series has no pivot_table
    last = ready.idxmax(axis=1)
    without = pd.Series({step: took[step] - (ready.loc[step].max() - ready.loc[step].drop(last[step]).max()) for step in took.index})
    return {
        "last_pipeline": {str(rank): int(number) for rank, number in last.value_counts().sort_index().items()},
        "step_s": float(took.mean()),
        "without_last_s": float(without.mean()),
        "speed_up": float(took.sum() / without.sum()),
        "ready_s": {str(rank): float(value) for rank, value in ready.mean().items()},
    }


def tables(rows: list[dict[str, Any]], pipelines: dict[str, Any]) -> str:
    """The tables of README.md."""
    lines = ["| job | stage | held out | rank's step p50 | p95 | slowest rank's step p50 | p95 |", "|---|---|---|---|---|---|---|"]
    for key, name in (("alternating", "every second step"), ("in_order", "the second half")):
        for row in rows:
            cells = [row["job"], str(row["stage"]), name, *(f"{error:+.1%}" for error in row[key].values())]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| job | stage | step | without the slowest rank, replayed | the same, drawn | without stragglers, replayed |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        one, other = (without_rank(row[key]) for key in ("what_if_replayed", "what_if_drawn"))
        cells = [row["job"], str(row["stage"]), f"{row['what_if_replayed']['step_s']:.3f} s", one, other]
        lines.append("| " + " | ".join([*cells, f"{row['what_if_replayed']['without stragglers']:.3f}x"]) + " |")
    lines += ["", "| job | last pipeline (steps) | step | without it | speed-up |", "|---|---|---|---|---|"]
    for job, found in pipelines.items():
        last = ", ".join(f"{rank} ({number})" for rank, number in found["last_pipeline"].items())
        lines.append(f"| {job} | {last} | {found['step_s']:.3f} s | {found['without_last_s']:.3f} s | {found['speed_up']:.3f}x |")
    return "\n".join(lines) + "\n"


def without_rank(found: dict[str, float]) -> str:
    """The spared rank and its gain."""
    name, gain = next((name, gain) for name, gain in found.items() if name.startswith("without rank"))
    return f"{name.removeprefix('without ')}: {gain:.3f}x"


if __name__ == "__main__":
    main()
