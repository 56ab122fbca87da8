"""Answer: a tuning's verdict, the gain and its evidence, the reason, and how to use it."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.quantities import counted
from fleetbench.strategy import DistributedStrategy
from tuner.notes import LeftOut
from tuner.recommendation import Arm, Recommendation
from tuner.space import name_of

if TYPE_CHECKING:
    import pandas as pd

_TRAINS = ("localsgd", "adaptive_localsgd", "gradient_merge")
_LEAST_SHARE = 0.05
"""Smallest share of a step that the answer mentions."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Formatted values of one figure for the default and for another strategy."""

    what: str
    """Name of the figure."""
    today: str
    """Value for the default."""
    other: str
    """Value for the other strategy."""
    gain: str = ""
    """Ratio of the default's value to the other strategy's, with its interval."""
    rests_on: str = ""
    """Evidence for the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of a tuning, as formatted text."""

    verdict: str
    """Verdict: ``USE``, ``KEEP DEFAULT`` or ``UNDECIDED``."""
    what: str
    """Strategy to use, or the best one that was tried if none is recommended, in words."""
    column: str
    """Heading of that strategy's column in the table of ``figures``."""
    figures: tuple[Figure, ...]
    """Figures of both strategies."""
    lines: tuple[tuple[str, str], ...]
    """Pairs of a heading and its text."""
    seeds: tuple[tuple[str, ...], ...] = ()
    """Rows, one per seed with its own runs to the target: seed, steps and seconds of the default, steps and
    seconds of the other strategy, ratio."""
    not_chosen: tuple[tuple[str, str], ...] = ()
    """Pairs of an arm that ran and the reason why it is not recommended."""


def answer_of(found: Recommendation, folder: Path, splits: pd.DataFrame, first_seed: int = 0) -> Answer:
    """Return the answer of the tuning in a folder.

    ``splits`` is the result of ``splits_of``; ``first_seed`` is the first seed of the runs to the target.
    """
    used, best = found.verdict == "USE", best_of(found)
    tried = "" if best is None else in_words(best.strategy, found.arms[0].strategy)
    verdict = found.verdict if used or not found.undecided else "UNDECIDED"
    figures = () if best is None else tuple(_figures(found, best))
    gains = [figure.gain.partition(" ")[0] for figure in figures]
    factors = f"{gains[0]} is {gains[1]} in steps times {gains[2]} in time per step" if len(gains) > 1 and gains[0] else ""
    why = filter(None, [factors, *_shares(splits, found), _meets(found.strategy) if found.strategy.is_local else ""])
    lines = [("why", "; ".join(why) if used else found.reason), ("note", found.caveat or "")]
    if used:
        local = "; call fleet.synchronize() before evaluation and saving" if found.strategy.is_local else ""
        lines.append(("use it", f"{folder / 'recommended.md'} says how, in plain PyTorch where it can{local}"))
    if verdict == "UNDECIDED" and any(arm.void_runs for arm in found.arms):
        lines.append(("next", "tune again while the machine is quiet; --from this folder keeps what counted"))
    lines.append(("noise", f"{found.noise or ''}"))
    counts = f"{found.num_trials} strategies simulated, {len(found.arms)} of them run for real"
    lines.append(("details", f"{folder / 'report.html'}: {counts}, and what was not searched"))
    return Answer(
        verdict=verdict,
        what=f"{'keep the default; ' if verdict == 'UNDECIDED' else ''}tried: {tried}" if tried and not used else tried,
        column="recommended" if used else "tried",
        figures=figures,
        lines=tuple((heading, text) for heading, text in lines if text),
        seeds=() if best is None else tuple(_seeds(found, best, first_seed)),
        not_chosen=tuple(_not_chosen(found)),
    )


def in_words(strategy: DistributedStrategy, default: DistributedStrategy) -> str:
    """Describe a strategy in words: how it trains, then its other changes from the default."""
    local = strategy.localsgd and strategy.localsgd_configs.has_outer
    kind = "DiLoCo" if local else "Local SGD" if strategy.is_local else ""
    plain, own = (each.without("lr_scale", *_TRAINS, *(f"{name}_configs" for name in _TRAINS)) for each in (strategy, default))
    trains = "" if plain == strategy else ", ".join(filter(None, (kind, name_of(strategy))))
    changed = plain.changes(own)
    return ", ".join(filter(None, (trains, "" if trains and not changed else units.changes(changed))))


def text_of(answer: Answer, width: int) -> str:
    """Return the answer for a terminal of ``width`` columns, without truncation."""
    wrap = textwrap.TextWrapper(width=width, break_on_hyphens=False, break_long_words=False)
    wrap.initial_indent, wrap.subsequent_indent = f"{answer.verdict}  ", " " * (len(answer.verdict) + 2)
    parts = [wrap.fill(answer.what) if answer.what else answer.verdict, ""]
    if answer.figures:
        parts += [*_rows(answer, width), ""]
    for heading, text in answer.lines:
        wrap.initial_indent, wrap.subsequent_indent = f"  {heading:<9} ", " " * 12
        parts.append(wrap.fill(text))
    return "\n".join(parts)


def _rows(answer: Answer, width: int) -> list[str]:
    """Format the figures as a table. If it is too wide, a figure's evidence goes on a line below it."""
    heading = Figure("", "today", answer.column, "gain (90 %)")
    cells = [(one.what, one.today, one.other, one.gain, one.rests_on) for one in (heading, *answer.figures)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_wide = 2 + sum(widths) + 2 * 4 > width
    rows = []
    for what, today, other, gain, rests_on in cells:
        row = f"  {what:<{widths[0]}}  {today:>{widths[1]}}  {other:>{widths[2]}}  {gain:<{widths[3]}}"
        rows.append((row if is_wide else f"{row}  {rests_on}").rstrip())
        if is_wide and rests_on:
            rows.append(f"      {rests_on}")
    return rows


def best_of(found: Recommendation) -> Arm | None:
    """Return the finalist, or else the fastest other arm than the default; None if no other arm ran."""
    ran = [arm for arm in found.arms[1:] if arm.ratio is not None]
    finalist = next((arm for arm in ran if arm.name == found.finalist), None)
    return finalist or min(ran, key=lambda arm: (arm.rejected is not None, arm.ratio), default=None)


def step_seconds(found: Recommendation, best: Arm) -> tuple[float, float]:
    """Return the seconds per step of the default and of the strategy ``best``.

    They are measured in pairs or, without pairs, in the legs that rank the arms.
    """
    if found.speedup is not None and found.pairs:
        default_s = statistics.geometric_mean(pair.default_s for pair in found.pairs)
        return default_s, default_s / found.speedup
    default_s = found.arms[0].real_s or math.nan
    return default_s, default_s * (best.ratio or math.nan)


def _figures(found: Recommendation, best: Arm) -> Iterator[Figure]:
    default, (default_s, own_s) = found.arms[0], step_seconds(found, best)
    if found.target_loss is not None and default.target is not None and best.target is not None:
        checks = default.target.updates, best.target.updates
        both = [pair for pair in zip(*checks, strict=False) if None not in pair]
        today, own = map(_mean, zip(*both, strict=True) if both else checks)
        step, target = (found.speedup, found.low, found.high), (found.to_target, found.to_target_low, found.to_target_high)
        mean, *ends = step if best.target.from_arm == default.name else target
        gain, fewer = ("", "") if mean is None or found.speedup is None else (_gain(mean, *ends), f"{mean / found.speedup:.2f}x")
        seeds = f"{len(both)} of {counted(len(best.target.updates), 'seed')}"
        bounds = "; the gain counts the others as bounds" if found.to_target is not None and len(both) < len(best.target.updates) else ""
        yield Figure(f"time to loss {found.target_loss:g}", _time(today, default_s), _time(own, own_s), gain, seeds + bounds)
        yield Figure(f"steps to loss {found.target_loss:g}", _count(today), _count(own), fewer)
    if found.speedup is not None and found.pairs:
        gain, rests_on = _gain(found.speedup, found.low, found.high), counted(len(found.pairs), "pair")
    else:
        gain, rests_on = f"{default_s / own_s:.2f}x", counted(len(best.measured_s), "leg") + ", no interval"
    yield Figure("time per step", _ms(default_s), _ms(own_s), gain, rests_on)


def _seeds(found: Recommendation, best: Arm, first_seed: int) -> Iterator[tuple[str, ...]]:
    """Yield a row of ``Answer.seeds`` for each seed; nothing if both strategies train the same way."""
    default, seconds = found.arms[0].target, step_seconds(found, best)
    if default is None or best.target is None or best.target.from_arm == found.arms[0].name:
        return
    for number, steps in enumerate(zip(default.updates, best.target.updates, strict=False), first_seed):
        today, own = (None if count is None else count * step_s for count, step_s in zip(steps, seconds, strict=True))
        ratio = None if today is None or own is None else today / own
        yield f"{number}", _count(steps[0]), units.seconds(today), _count(steps[1]), units.seconds(own), units.ratio(ratio)


def _not_chosen(found: Recommendation) -> Iterator[tuple[str, str]]:
    """Yield the name of each arm that is not recommended, with the reason."""
    told = {name: f"{note.how}: {note.reason}" for note in found.told if isinstance(note, LeftOut) for name in note.what.split(", ")}
    what = "step" if found.target_loss is None else "time to the target"
    for arm in (arm for arm in found.arms[1:] if found.verdict != "USE" or arm.name != found.finalist):
        expected = arm.expected or arm.ratio
        if arm.rejected is not None:
            yield arm.name, arm.rejected
        elif arm.name == found.finalist:
            gain = "too few pairs" if found.speedup is None else next(_figures(found, arm)).gain
            yield arm.name, f"{'undecided' if found.undecided else 'no gain'}: {gain}"
        elif arm.name in told:
            yield arm.name, told[arm.name]
        elif expected is None:
            yield arm.name, "measuring ended before it was ranked"
        else:
            verdict = "no faster" if expected >= 1 else "not compared in pairs"
            yield arm.name, f"{verdict}: {expected:.2f} times the default's {what} is expected"


def _mean(updates: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the numbers of steps of the runs that arrived; None if none did."""
    arrived = [one for one in updates if one is not None]
    return statistics.geometric_mean(arrived) if arrived else None


def _count(steps: float | None) -> str:
    return units.NONE if steps is None else f"{steps:.0f}"


def _time(steps: float | None, step_s: float) -> str:
    return units.seconds(None if steps is None else steps * step_s)


def _gain(mean: float, low: float | None, high: float | None) -> str:
    return f"{mean:.2f}x" if low is None or high is None else f"{mean:.2f}x [{low:.2f}, {high:.2f}]"


def _ms(value_s: float) -> str:
    return f"{units.milliseconds(value_s)} ms"


def _shares(splits: pd.DataFrame, found: Recommendation) -> Iterator[str]:
    """Yield a phrase for each of the default's waits that takes enough of a step, with the finalist's share."""
    rows = [splits.loc[row] / splits.loc[row].sum() for row in ("default, real", f"{found.finalist}, real") if row in splits.index]
    for part, what in (("exposed communication", "communication that no compute hides"), ("wait", "waiting for the slowest trainer")):
        if len(rows) == 2 and rows[0][part] >= _LEAST_SHARE:
            yield f"{what} is {100 * rows[0][part]:.0f} % of today's step, and {100 * rows[1][part]:.0f} % of the recommended one"


def _meets(strategy: DistributedStrategy) -> str:
    """Describe how often trainers synchronise."""
    return "K adapts" if strategy.adaptive_localsgd else f"K = {strategy.local_steps} exchanges once in {strategy.local_steps} steps"
