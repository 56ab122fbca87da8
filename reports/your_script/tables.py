"""Print the tables of README.md from ``raw.jsonl``: ``python reports/your_script/tables.py [RAW]``.

Void measurements are counted, and left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy import stats

Entry = dict[str, Any]
CONFIDENCE = 0.90


def main(path: Path) -> None:
    """Every part that was measured."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for part, table in (
        ("switching", switching),
        ("parameters", parameters),
        ("alone", alone),
        ("profiler", profiler),
        ("verdicts", verdicts),
    ):
        entries = [entry for entry in found if entry["part"] == part]
        valid = [entry for entry in entries if not entry["void"]]
        if entries:
            print(f"\n{part}: {len(valid)} of {len(entries)} measurements count\n")
        if valid:
            for line in table(valid):
                print(line)


def half_width(values: Sequence[float]) -> float:
    """Half of the two-sided 90 % interval of a mean; not known of one value."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def switching(entries: list[Entry]) -> Iterable[str]:
    """Of each pair: the leg over a launch of its own in the same round, and by how much such launches differ among themselves."""
    fresh = {entry["round"]: entry["ms"] for entry in entries if entry["kind"] == "fresh"}
    ordinary = {entry["round"]: entry["ms"] for entry in entries if entry["kind"] == "launches"}
    legs = {entry["round"]: entry for entry in entries if entry["kind"] == "legs"}
    rounds = sorted(fresh.keys() & legs.keys() & ordinary.keys())
    if not rounds:
        return
    yield "| leg before | leg | launch of its own, ms | leg, ms | leg over launch, minus 1 | A/A of launches | within |"
    yield "|---|---|---|---|---|---|---|"
    chain = legs[rounds[0]]["chain"]
    for place, (before, name) in enumerate(zip(["default (recorded)", *chain], chain, strict=False)):
        alone_ms = [fresh[number][name] for number in rounds]
        leg_ms = [legs[number]["ms"][place] for number in rounds]
        ratios = [math.log(leg / one) for leg, one in zip(leg_ms, alone_ms, strict=True)]
        spread = [math.log(one) for one in alone_ms]
        # Two means of as many launches differ by this much at 90 %, though nothing differs.
        noise = math.sqrt(2) * half_width(spread)
        within = "yes" if abs(mean(ratios)) <= noise else "NO"
        off = f"{100 * math.expm1(mean(ratios)):+.1f} % ± {100 * half_width(ratios):.1f}"
        yield f"| {before} | {name} | {mean(alone_ms):.3f} | {mean(leg_ms):.3f} | {off} | {100 * noise:.1f} % | {within} |"
    yield "\n| strategy | ordinary launch, ms | under the driver, ms | under the driver over ordinary, minus 1 |"
    yield "|---|---|---|---|"
    for name in ordinary[rounds[0]]:
        pairs = [(ordinary[number][name], fresh[number][name]) for number in rounds]
        ratios = [math.log(driven / plain) for plain, driven in pairs]
        off = f"{100 * math.expm1(mean(ratios)):+.1f} % ± {100 * half_width(ratios):.1f}"
        yield f"| {name} | {mean(plain for plain, _ in pairs):.3f} | {mean(driven for _, driven in pairs):.3f} | {off} |"
    said = [math.log(said / ms) for number in rounds for said, ms in zip(legs[number]["said_ms"], legs[number]["ms"], strict=True)]
    yield f"\nWhat legs say of themselves (means, outliers included) over the script's own stamps: {100 * mean(said):+.1f} %."


def parameters(entries: list[Entry]) -> Iterable[str]:
    """Each time that it was done."""
    for entry in entries:
        legs = ", ".join(f"{name} ({steps})" for name, steps in entry["legs"])
        yield f"- {legs}: {entry['steps']} steps of two ranks, {entry['parameters']} parameters: they differ by"
        yield f"  {entry['largest_difference']:.1e} at most, behind any step, where they are up to {entry['largest_parameter']:.2f}"
        yield f"  and ranks up to {entry['ranks_apart']:.2f} apart."


def alone(entries: list[Entry]) -> Iterable[str]:
    """By processes: paired with the plain loop of the same turn."""
    yield "| processes | loop | ms a step | over plain, minus 1 |\n|---|---|---|---|"
    for processes in sorted({entry["processes"] for entry in entries}):
        turns = [entry["ms"] for entry in entries if entry["processes"] == processes]
        for variant in ("plain", "joined", "init", "four"):
            found = [turn for turn in turns if variant in turn]
            if found:
                ratios = [math.log(turn[variant] / turn["plain"]) for turn in found]
                off = f"{100 * math.expm1(mean(ratios)):+.1f} % ± {100 * half_width(ratios):.1f}" if variant != "plain" else ""
                yield f"| {processes} | {variant} | {mean(turn[variant] for turn in found):.4f} | {off} |"


def profiler(entries: list[Entry]) -> Iterable[str]:
    """All turns of all launches."""
    quiet = [ms for entry in entries for ms in entry["quiet_ms"]]
    profiled = [ms for entry in entries for ms in entry["profiled_ms"]]
    ratios = [math.log(hooked / ms) for hooked, ms in zip(profiled, quiet, strict=True)]
    yield (
        f"A step without exchange takes {mean(quiet):.3f} ms, in a leg of layer times {mean(profiled):.3f} ms: "
        f"{100 * math.expm1(mean(ratios)):+.1f} % ± {100 * half_width(ratios):.1f}, {len(ratios)} turns."
    )


def verdicts(entries: list[Entry]) -> Iterable[str]:
    """What was recommended; what was simulated beside what was measured; runs with it."""
    for entry in entries:
        if "recommendation" in entry:
            yield from _verdict(entry)
        else:
            default, own = ([pair[index] for pair in entry["again_s"]] for index in (0, 1))
            ratios = [math.log(one / other) for one, other in entry["again_s"]]
            yield (
                f"\n{entry['script']}, ordinary launches in turns, first to last line of log: default {mean(default):.2f} s, "
                f"with recommended.toml {mean(own):.2f} s: {math.exp(mean(ratios)):.2f} times as fast, {len(ratios)} turns."
            )


def _verdict(entry: Entry) -> Iterable[str]:
    found = entry["recommendation"]
    speedup = f", {found['speedup']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]" if found.get("speedup") else ""
    yield f"\n{entry['script']}: **{found['verdict']}**{speedup} after {entry['tune_s']:.0f} s. {found['reason']}\n"
    yield "| arm | simulated, ms | measured, ms, mean [legs] | error | within 5 % |\n|---|---|---|---|---|"
    pairs = found.get("pairs", [])
    for arm in found["arms"]:
        which = {"default": "default_s", found.get("finalist"): "finalist_s"}.get(arm["name"])
        legs = [1e3 * each for each in (*arm.get("measured_s", ()), *(pair[which] for pair in pairs if which))]
        if not legs:
            continue
        simulated = 1e3 * arm["simulated_s"]
        error = simulated / mean(legs) - 1
        spread = f"{mean(legs):.3f} [{min(legs):.3f}, {max(legs):.3f}] n = {len(legs)}"
        yield f"| {arm['name']} | {simulated:.3f} | {spread} | {100 * error:+.1f} % | {'yes' if abs(error) <= 0.05 else 'NO'} |"
    yield from _to_target(found)


def _to_target(found: Entry) -> Iterable[str]:
    """The verdict's own runs to the target, one an arm."""
    times = {arm["name"]: arm["target"]["time_s"] for arm in found["arms"] if arm.get("target")}
    own = found.get("finalist")
    if own in times and "default" in times:
        default, finalist = times["default"], times[own]
        text = f"to the target, one run each: default {default:.3f} s, {own} {finalist:.3f} s"
        yield f"\n{text}: {default / finalist:.2f} times as fast."


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("raw.jsonl"))
