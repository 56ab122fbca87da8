"""A simulated run against real ones: what matches, by how much the simulation misses, and what is only noise.

Runs of one experiment meet the same batches, the same decisions and the same draws of every
straggler, so that step 7 of one is step 7 of the other. What the simulator believes of links, where
processes were started, and names may differ, and are said; anything else makes other steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from fleetbench.config import encode, flat
from fleetbench.errors import ConfigError
from fleetbench.report import units
from fleetbench.report.step_errors import Noise, Spread, StepErrors, step_errors
from fleetbench.result import RunResult

SIM, REAL = "sim", "real"

_BELIEFS = frozenset(
    {"name", "workload.profile", "workload.target_loss", "workload.eval_every"}
    | {f"run.{name}" for name in ("launcher", "port", "startup_timeout", "timeout")}
    | {f"cluster.{name}" for name in ("nics_per_node", "cores_per_node", "node_overrides", "collective")}
)
_BELIEVED_TABLES = ("tune.", "run.environment.", "cluster.intra.", "cluster.inter.", "cluster.racks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two runs differ."""

    key: str
    a: Any
    b: Any
    other_steps: bool
    """Step by step, the runs did not do the same."""

    def text(self) -> str:
        """In one line."""
        return f"{self.key}: {units.number(self.a)} against {units.number(self.b)}"


def differences_of(a: RunResult, b: RunResult) -> tuple[Difference, ...]:
    """All differences of two runs' experiments, ranks and steps; what makes other steps comes first."""
    found = _of_experiments(a, b)
    ranks, steps = ((_spans(a, column), _spans(b, column)) for column in ("rank", "step"))
    same = a.summary.trainers == b.summary.trainers and not _keys(a).symmetric_difference(_keys(b)).size
    if not same or _keys(a).has_duplicates or _keys(b).has_duplicates:
        spans = (("ranks", *ranks), ("counted steps", *steps))
        different = [span for span in spans if span[1] != span[2]] or spans
        found += [Difference(key=key, a=left, b=right, other_steps=True) for key, left, right in different]
    if a.plan.digest != b.plan.digest:
        found.append(Difference(key="plan", a=_plan(a), b=_plan(b), other_steps=False))
    return tuple(sorted(found, key=lambda difference: not difference.other_steps))


def _of_experiments(a: RunResult, b: RunResult) -> list[Difference]:
    left, right = (dict(flat(encode(run.experiment))) for run in (a, b))
    found = [
        Difference(key=key, a=left.get(key), b=right.get(key), other_steps=not _is_belief(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]
    if not found and a.summary.experiment != b.summary.experiment:  # the digest also covers what the named files hold
        key = "contents of a file that the experiment names"
        found.append(Difference(key=key, a=a.summary.experiment, b=b.summary.experiment, other_steps=False))
    return found


def _is_belief(key: str) -> bool:
    return key in _BELIEFS or key.startswith(_BELIEVED_TABLES)


def _keys(run: RunResult) -> pd.MultiIndex:
    counted = run.steps[run.steps["step"] >= 1]
    return pd.MultiIndex.from_frame(counted[["rank", "step"]])


def _spans(run: RunResult, column: str) -> str:
    """Which numbers a column holds: ``0 to 3``, and how many where some are left out."""
    values = run.steps.loc[run.steps["step"] >= 1, column]
    if values.empty:
        return "none"
    first, last, num = int(values.min()), int(values.max()), int(values.nunique())
    return f"{first} to {last}" + ("" if num == last - first + 1 else f", {num} of them")


def _plan(run: RunResult) -> str:
    return f"{len(run.plan.buckets)} buckets ({run.plan.digest[:8]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How true a simulation is."""

    differences: tuple[Difference, ...]
    """Of the simulated run (A) and the real one (B); what makes other steps comes first."""
    errors: StepErrors | None
    """None where the runs' steps are not the same steps."""
    noise: Noise | None
    """None without repeats of the real run."""
    notes: tuple[str, ...]

    @property
    def within_noise(self) -> dict[str, bool]:
        """Of the run time, the step and each phase: whether its error is no larger than what real runs differ by. Empty if unknown.

        The run time's error is its log-ratio. The others' are their mean absolute error and their bias, both:
        steps of two real runs scatter by more than those of a simulation about their mean do, so that the
        first alone would hide a bias.
        """
        if self.errors is None or self.noise is None:
            return {}
        phases = {
            phase.name: _is_within(phase.error_s, self.noise.phase_s(phase.name)) for phase in (self.errors.step, *self.errors.phases)
        }
        return {"wall": abs(self.errors.wall_log_ratio) <= self.noise.wall_log_ratio} | phases

    def to_dict(self) -> dict[str, Any]:
        """As JSON's data."""
        return {
            "comparable": self.errors is not None,
            "differences": [
                {"key": found.key, "sim": found.a, "real": found.b, "other_steps": found.other_steps} for found in self.differences
            ],
            "notes": list(self.notes),
            "errors": None if self.errors is None else self.errors.to_dict(),
            "noise": None if self.noise is None else self.noise.to_dict(),
            "within_noise": self.within_noise,
        }


def compare_fidelity(a: RunResult, b: RunResult, repeats: Sequence[RunResult] = ()) -> Fidelity | None:
    """Lay a simulated run beside a real one, whichever comes first; none where both were executed alike.

    ``repeats`` are further real runs of the same experiment. Raises ``ConfigError`` for one that is none.
    """
    executors = {run.summary.executor: run for run in (a, b)}
    if set(executors) != {SIM, REAL}:
        if repeats:
            raise ConfigError(
                "repeats are for a simulated and a real run: they say what part of the error is noise",
                "compare",
                f"A and B are both {a.summary.executor}",
                "compare two runs, or a simulated run with real ones",
            )
        return None
    simulated, real = executors[SIM], executors[REAL]
    for number, repeat in enumerate(repeats):
        _check_repeat(repeat, real, repeats[:number])
    found = differences_of(simulated, real)
    return Fidelity(
        differences=found,
        errors=None if any(difference.other_steps for difference in found) else step_errors(simulated, real),
        noise=Noise.of([real, *repeats]),
        notes=(*_notes(simulated, real), *_void_notes([real, *repeats])),
    )


def _is_within(error: Spread, noise: Spread) -> bool:
    return error.mean_absolute <= noise.mean_absolute and abs(error.bias) <= abs(noise.bias)


def _check_repeat(repeat: RunResult, real: RunResult, others: Sequence[RunResult]) -> None:
    where = repeat.summary.run_id if repeat.path is None else str(repeat.path)
    hint = "name real runs of B's experiment, each once"
    if repeat.summary.executor != REAL:
        raise ConfigError("a repeat is a real run", where, repeat.summary.executor, hint)
    if repeat.summary.run_id in {run.summary.run_id for run in (real, *others)}:
        raise ConfigError("is named twice: a run does not differ from itself", where, hint=hint)
    differences = differences_of(real, repeat)
    if differences and differences[0].key != "plan":  # which rank 0 decides again in every launch
        raise ConfigError("is no repeat of B, whose experiment is another", where, differences[0].text(), hint)


def _notes(simulated: RunResult, real: RunResult) -> Iterator[str]:
    """What a reader must know of the steps before believing their errors."""
    stragglers = real.experiment.cluster.stragglers
    left_out = [entry for entry in real.summary.skipped if entry["what"].startswith("cluster.stragglers")]
    if not stragglers:
        yield "no stragglers are declared, so none were injected: what makes real steps differ among themselves is not simulated"
    elif left_out:
        yield f"the real run did not inject the stragglers that are simulated: {left_out[0]['why']}"
    if real.summary.emulated:
        yield "the real run emulated its compute: it slept, and sent real bytes"
    if real.summary.launcher == "testbed" and simulated.experiment.cluster.inter == real.experiment.cluster.inter:
        yield (
            "both ran with the declared bandwidth, of which a testbed's links carry 1448/1514 as payload, as Ethernet does: "
            "simulate with a measured profile"
        )
    for entry in real.summary.skipped:
        if entry not in left_out:
            yield f"the real run did not realise {entry['what']}: {entry['why']}"
    other = _other_rounds(simulated, real)
    if other:
        yield f"{other} steps end a round in one run and not in the other, or one of another length"


def _void_notes(runs: Sequence[RunResult]) -> Iterator[str]:
    for run in runs:
        if run.summary.testbed is not None and not run.summary.testbed["counts"]:
            yield f"run {run.summary.run_id} is void, and what it differs by is no noise: the machine was not quiet in any of its repeats"


def _other_rounds(simulated: RunResult, real: RunResult) -> int:
    """Steps of rank 0 at which rounds of other lengths close, among those that both runs have."""
    left, right = (
        run.steps[(run.steps["step"] >= 1) & (run.steps["rank"] == 0)].set_index("step")["local_steps"].astype("Float64").fillna(0)
        for run in (simulated, real)
    )
    both = left.index.intersection(right.index)
    return int((left[both].to_numpy() != right[both].to_numpy()).sum())
