"""Straggler traces of two production jobs: who is slow, does the fitted model predict other steps, and what would be gained.

Run from the repository's root: ``python reports/straggler_traces/analyse.py``. Writes ``results.json``,
``tables.md`` and ``groups.png``. The sampled steps of a job are split before anything is looked at: the
first, third, fifth, ... in order are fitted, the second, fourth, ... are held out.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment, Run
from fleetbench.fitting.distributions import Fitted
from fleetbench.fitting.stragglers import fit_stragglers
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import machine, versions
from fleetbench.stragglers import Straggler, Trace
from fleetbench.workload import LayerSpec, Workload
from held_out import HeldOut, hold_out
from sim.many.what_if import what_if

HERE = Path(__file__).parent
JOBS = ("one_slow_worker", "long_last_stage")
DRAWS = 400
SLOW = 1.02
COMPUTE = ("forward-compute", "backward-compute")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """One stage's data-parallel group of a job."""

    job: str
    stage: int
    times_s: Floats
    steps: tuple[int, ...]
    exchange_s: float
    """Reduce-scatter of gradients and all-gather of parameters: the shortest over the ranks, median over the fitted steps."""
    forward_share: float

    @property
    def fitted_s(self) -> Floats:
        """Of the first, third, ... step."""
        return self.times_s[:, ::2]

    @property
    def held_out_s(self) -> Floats:
        """Of the second, fourth, ... step."""
        return self.times_s[:, 1::2]


def main() -> None:
    """All groups of both jobs."""
    groups = [group for job in JOBS for group in read(job)]
    rows = [row_of(group) for group in groups]
    pipelines = {job: counterfactual(job) for job in JOBS}
    data = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "versions": versions(),
        "draws": DRAWS,
        "groups": rows,
        "pipelines": pipelines,
    }
    (HERE / "results.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (HERE / "tables.md").write_text(tables(rows, pipelines), encoding="utf-8")
    figure(groups, rows).savefig(HERE / "groups.png", dpi=130, metadata={"Software": None})
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
                steps=tuple(times.columns.tolist()),
                exchange_s=float(shortest.median()),
                forward_share=float(compute["forward-compute"] / compute.sum()),
            )
        )
    return groups


def row_of(group: Group) -> dict[str, Any]:
    """What is reported of a group."""
    fit = fit_stragglers(group.fitted_s, 0, list(range(len(group.times_s))))
    shared = hold_out(group.fitted_s, group.held_out_s, 0, draws=DRAWS)
    independent = hold_out(group.fitted_s, group.held_out_s, 0, draws=DRAWS, is_shared=False)
    slow = [rank for rank, factor in enumerate(fit.rank_factors) if factor >= SLOW]
    return {
        "job": group.job,
        "stage": group.stage,
        "ranks": len(group.times_s),
        "fitted_steps": group.fitted_s.shape[1],
        "held_out_steps": group.held_out_s.shape[1],
        "rank_factors": fit.rank_factors,
        "slow_ranks": slow,
        "base_s": fit.base * 1e-9,
        "correlation": fit.correlation,
        "statements": fit.statements,
        "prediction": told(shared),
        "independent": told(independent),
        "what_if_replayed": gains(group, replay=True),
        "what_if_fitted": gains(group, replay=False, entries=fit.entries, base_s=fit.base * 1e-9),
    }


def told(found: HeldOut) -> dict[str, Any]:
    """A prediction as plain data."""

    def law(fitted: Fitted | None) -> dict[str, Any] | None:
        kept = ("law", "base_s", "rate", "mean", "cv")
        return None if fitted is None else {name: value for name, value in asdict(fitted).items() if name in kept}

    return {
        "own": law(found.model.own),
        "shared": law(found.model.shared),
        "distance": found.distance,
        "threshold": found.threshold,
        "p": found.p,
        "num_fitted": found.num_fitted,
        "num_held_out": found.num_held_out,
        "predicts": found.predicts,
    }


def gains(group: Group, *, replay: bool, entries: tuple[Straggler, ...] = (), base_s: float = 0.0) -> dict[str, float]:
    """Gains of the group's what-ifs, its held-out steps replayed, or 1,000 steps drawn from the fit."""
    if not replay:
        return simulated(group, entries, base_s, steps=1000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held_out.parquet"
        rows = [(rank, step + 1, took) for rank, times in enumerate(group.held_out_s) for step, took in enumerate(times)]
        pd.DataFrame(rows, columns=["rank", "step", "compute_s"]).to_parquet(path)
        base_s = float(group.held_out_s.min())
        return simulated(group, (Trace(path=str(path), base=Nanoseconds(int(base_s * 1e9))),), base_s, steps=group.held_out_s.shape[1])


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
    lines = [
        "| job | stage | slow rank | correlation | own jitter | shared jitter | D held out | 95 % of draws | p | predicts |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row["prediction"]
        slow = ", ".join(f"{rank} ({row['rank_factors'][rank]:.2f}x)" for rank in row["slow_ranks"]) or "none"
        cells = [row["job"], row["stage"], slow, f"{row['correlation']:.2f}", law_cell(found["own"]), law_cell(found["shared"])]
        cells += [f"{found['distance']:.3f}", f"{found['threshold']:.3f}", f"{found['p']:.2f}", "yes" if found["predicts"] else "NO"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "The same with every rank's jitter drawn by itself:",
        "",
        "| job | stage | law | D held out | 95 % of draws | p | predicts |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        found = row["independent"]
        cells = [row["job"], row["stage"], law_cell(found["own"]), f"{found['distance']:.3f}", f"{found['threshold']:.3f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{found['p']:.2f}", "yes" if found["predicts"] else "NO"])) + " |")
    lines += [
        "",
        "| job | stage | step | without the slowest rank, replayed | the same, drawn from the fit | without stragglers, replayed |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        replayed, fitted = (without_rank(row[key]) for key in ("what_if_replayed", "what_if_fitted"))
        cells = [row["job"], row["stage"], f"{row['what_if_replayed']['step_s']:.3f} s", f"rank {replayed[0]}: {replayed[1]:.3f}x"]
        cells += [f"rank {fitted[0]}: {fitted[1]:.3f}x", f"{row['what_if_replayed']['without stragglers']:.3f}x"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| job | last pipeline (steps) | step | without it | speed-up |", "|---|---|---|---|---|"]
    for job, found in pipelines.items():
        last = ", ".join(f"{rank} ({number})" for rank, number in found["last_pipeline"].items())
        lines.append(f"| {job} | {last} | {found['step_s']:.3f} s | {found['without_last_s']:.3f} s | {found['speed_up']:.3f}x |")
    return "\n".join(lines) + "\n"


def without_rank(found: dict[str, float]) -> tuple[str, float]:
    """The spared rank and its gain."""
    name, gain = next((name, gain) for name, gain in found.items() if name.startswith("without rank"))
    return name.removeprefix("without rank "), gain


def law_cell(law: dict[str, Any] | None) -> str:
    """A law in few words."""
    if law is None:
        return "none"
    rate = f"{100 * law['rate']:.0f} % of steps: " if law.get("rate", 1.0) < 1.0 else ""
    return f"{rate}{law['law']}, mean {law['mean']:.4f}, cv {law['cv']:.2f}"


def figure(groups: list[Group], rows: list[dict[str, Any]]) -> Figure:
    """Step compute of every rank over the sampled steps, a panel a group: fitted steps filled, held-out ones open."""
    drawn = Figure(figsize=(11, 5.6), layout="constrained")
    axes = drawn.subplots(2, 4)
    colours = ("#1f4e79", "#c44e35", "#5b9a68", "#e0a030")
    for panel, group, row in zip(axes.ravel(), groups, rows, strict=True):
        at = np.arange(len(group.steps))
        for rank, times in enumerate(group.times_s):
            panel.plot(at[::2], times[::2], "o", color=colours[rank], markersize=3, label=f"rank {rank}")
            panel.plot(at[1::2], times[1::2], "o", color=colours[rank], markersize=3, fillstyle="none")
        found = row["prediction"]
        panel.set_title(f"{group.job}, stage {group.stage}\nD {found['distance']:.3f}, 95 % of draws {found['threshold']:.3f}", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[:, 0]:
        panel.set_ylabel("compute of a step (s)", fontsize=8)
    for panel in axes[1]:
        panel.set_xlabel("sampled step, in order", fontsize=8)
    axes[0, 0].plot([], [], "o", color="black", markersize=3, label="fitted")
    axes[0, 0].plot([], [], "o", color="black", markersize=3, fillstyle="none", label="held out")
    axes[0, 0].legend(fontsize=7)
    return drawn


if __name__ == "__main__":
    main()
