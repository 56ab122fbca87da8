"""The answer of ``fleetbench why`` as text, JSON and HTML: parts of a step, causes, remedies, conclusion."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from fleetbench.digests import write_whole
from fleetbench.quantities import counted
from fleetbench.report import figures
from fleetbench.report.html import page_of
from fleetbench.units import milliseconds
from fleetbench.why.shares import Kind, Share
from tuner.why.causes import Cause
from tuner.why.explanation import Explanation

_LABELS: dict[Kind, str] = {
    "input": "waiting for batches",
    "forward": "compute",
    "backward": "compute",
    "device": "compute",
    "optimizer": "optimizer",
    "loop": "the script's own code",
    "evaluate": "evaluation",
    "save": "saving",
    "gradients": "gradients that the backward does not hide",
    "gathers": "parameters that are gathered beside no compute",
    "regathers": "parameters that are gathered again for the backward",
    "buffers": "buffers sent before each forward",
    "unused": "the search for unused parameters",
    "collective": "collectives of the script's own",
    "idle": "the device waits for its host",
}
_LEAST = 0.01
"""Smallest share of a step that gets its own line."""
_CHANGED = 0.02
"""Smallest change of a part that is reported, as a share of the older step."""
_OF_CAUSE = ("name", "what", "remedy", "trains_differently", "simulated_s", "tried")
"""Fields of a cause that its JSON includes."""
_NOTHING = 0.9
"""Least efficiency at which the conclusion is that nothing is wrong, if no remedy is known."""


def text_of(found: Explanation, width: int) -> str:
    """Return the answer, wrapped to ``width`` columns."""
    shares = found.shares
    hosts = "" if found.hosts is None else f" on {counted(found.hosts, 'host')}"
    head = f"{counted(found.ranks, 'rank')}{hosts}, {counted(shares.num_steps, 'step')}, {found.seconds:.0f} s"
    lines = [head, "", *_wrapped(_step(found), width, "  ", "  "), ""]
    rows = list(rows_of(found))
    longest = max(len(milliseconds(seconds)) for seconds, _, _ in rows)
    column = max(len(label) for _, label, _ in rows)
    for seconds, label, causes in rows:
        marks = "; ".join(f"{found.causes.index(cause) + 1}. {cause.name}" for cause in causes)
        line = f"  {milliseconds(seconds):>{longest + 2}} ms  {label:<{column}}" + (f"  <- {marks}" if marks else "")
        lines += _wrapped(line, width, "", " " * (longest + 9))
    lines.append("")
    for number, cause in enumerate(found.causes, 1):
        lines += _wrapped(f"{cause.name}: {cause.what}.", width, f"  {number}. ", "     ")
        if cause.remedy:
            lines += _wrapped(f"remedy: {cause.remedy}", width, "     ", "       ")
        if gain := gain_of(cause, found):
            lines += _wrapped(gain, width, "     ", "       ")
    lines += _wrapped(conclusion_of(found), width, "  ", "  ")
    lines += [line for note in found.notes for line in _wrapped(f"note: {note}", width, "  ", "    ")]
    return "\n".join(line.rstrip() for line in lines)


def _step(found: Explanation) -> str:
    took = f"a step takes {milliseconds(found.shares.step_s)} ms"
    compute = f"one rank's compute takes {milliseconds(found.shares.compute_s)} ms of it"
    return f"{took}; {compute}: {100 * found.efficiency:.0f} % of what {counted(found.ranks, 'rank')} can do"


def rows_of(found: Explanation) -> Iterator[tuple[float, str, tuple[Cause, ...]]]:
    """Yield seconds per step, label and causes of each part: compute first, then the others by size."""
    rows: Counter[str] = Counter()
    causes: defaultdict[str, dict[Cause, None]] = defaultdict(dict)
    for share in found.shares.shares:
        label = _label(share, f"waiting for rank {share.rank}" if share.rank == found.shares.steady_rank else "waiting for each other")
        rows[label] += share.seconds  # type: ignore[assignment]  # seconds
        causes[label] |= {cause: None for cause in found.causes if share in cause.shares}
    kept = [label for label, seconds in rows.items() if seconds >= _LEAST * found.shares.step_s or causes[label]]
    for label in sorted(kept, key=lambda label: (label != _LABELS["forward"], -rows[label])):
        yield rows[label], label, tuple(causes[label])
    if small := sum(seconds for label, seconds in rows.items() if label not in kept):
        yield small, "other", ()


def _label(share: Share, waits: str) -> str:
    """Return the label of a share's line; ``waits`` is the label of time in which ranks wait for others."""
    if share.period is not None:
        return "work in some steps only"
    return _LABELS[share.kind] if share.rank is None else waits


def gain_of(cause: Cause, found: Explanation) -> str:
    """Return a phrase about the gain of a cause's remedy: as tried, else as simulated, else that neither was done.

    Empty for a cause without a remedy that was neither tried nor simulated.
    """
    if cause.tried is not None:
        return f"tried here: {cause.tried}{'' if cause.tried.helps else ': no gain is sure'}"
    if cause.simulated_s is not None:
        changes = f" Training changes: {cause.trains_differently}." if cause.trains_differently else ""
        without = "simulated with it" if cause.remedy and not cause.is_bound else "simulated without it"
        return f"{without}: {milliseconds(found.shares.step_s)} -> {milliseconds(cause.simulated_s)} ms.{changes}"
    return "neither simulated nor tried here" if cause.remedy else ""


def conclusion_of(found: Explanation) -> str:
    """Return the last line: the gain of all remedies, or that none is known, or that nothing is wrong."""
    can = f"{100 * found.efficiency:.0f} % of what {counted(found.ranks, 'rank')} can do"
    if not any(cause.remedy for cause in found.causes):
        if found.efficiency >= _NOTHING:
            return f"nothing is wrong: {can}"
        first = next((cause for cause in found.causes if cause.simulated_s is not None), None)
        without = "" if first is None else f"; without {first.name} it would take {milliseconds(first.simulated_s)} ms"
        return f"fleetbench knows no setting that would shorten this step: {can}{without}"
    both = "" if found.all_s is None else f"all of it: {milliseconds(found.shares.step_s)} -> {milliseconds(found.all_s)} ms. "
    is_many = sum(bool(cause.remedy) for cause in found.causes) > 1
    return f"{both if is_many else ''}fleetbench tune -- COMMAND tries and proves what a setting can change"


def data_of(found: Explanation) -> dict[str, Any]:
    """Return the answer as JSON data, which ``--json`` prints and ``--against`` reads. Times are in seconds."""
    return {
        "command": found.command,
        "ranks": found.ranks,
        "hosts": found.hosts,
        "device": found.device,
        "steps": found.shares.num_steps,
        "step_s": found.shares.step_s,
        "compute_s": found.shares.compute_s,
        "efficiency": found.efficiency,
        "conclusion": conclusion_of(found),
        "parts": [{"what": label, "seconds": took, "causes": [cause.name for cause in causes]} for took, label, causes in rows_of(found)],
        "causes": [
            {"seconds": cause.seconds} | {name: value for name, value in asdict(cause).items() if name in _OF_CAUSE}
            for cause in found.causes
        ],
        "with_all_remedies_s": found.all_s,
        "shares": [asdict(share) for share in found.shares.shares],
        "looked_s": found.seconds,
        "notes": list(found.notes),
    }


def changes_since(found: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a step and of its parts in seconds since an older answer.

    Parts that changed by less than 2 % of the older step are left out. Both answers are results of ``data_of``.
    """
    changed: Counter[str] = Counter()
    for each, sign in ((found, 1), (old, -1)):
        for share in each["shares"]:
            what = _label(Share(**share), "waiting for other ranks")
            changed[what] += sign * share["seconds"]
    kept = sorted((what for what in changed if abs(changed[what]) >= _CHANGED * old["step_s"]), key=lambda what: -abs(changed[what]))
    return {
        "step_s": [old["step_s"], found["step_s"]],
        "slower": found["step_s"] / old["step_s"] - 1,
        "is_same_job": all(found[name] == old[name] for name in ("command", "ranks")),
        "parts": {what: changed[what] for what in kept},
    }


def text_of_changes(since: Mapping[str, Any], width: int) -> str:
    """Format ``changes_since`` for a terminal."""
    before_s, step_s = since["step_s"]
    lines = [f"since then: a step takes {milliseconds(before_s)} -> {milliseconds(step_s)} ms ({100 * since['slower']:+.1f} %)"]
    lines += [] if since["is_same_job"] else ["  note: that was another command, or another number of ranks"]
    for what, changed_s in since["parts"].items():
        lines += _wrapped(f"{milliseconds(changed_s, sign=True):>8} ms  {what}", width, "  ", "    ")
    return "\n".join(lines)


def write_page(found: Explanation, folder: Path) -> Path:
    """Write ``why.html``, the answer with a picture of one step on all ranks, and return its path."""
    steps = pd.DataFrame(found.step, columns=["rank", "name", "start_s", "duration_s"]).assign(stream="step", row=0)
    page = page_of(
        "why.html",
        found=found,
        rows=[(milliseconds(took), label, causes) for took, label, causes in rows_of(found)],
        step=_step(found),
        gain=lambda cause: gain_of(cause, found),
        conclusion=conclusion_of(found),
        picture=figures.data_uri(figures.timeline(steps)) if found.step else "",
    )
    write_whole(path := folder / "why.html", page)
    return path


def _wrapped(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
