"""The tables of README.md, from the raw results of testbed.py. Void measurements are counted and left out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from real.testbed.topology import PAYLOAD_SHARE
from tuner.sequential import paired_speedup

Entry = dict[str, Any]
TUNED, GEO = "asynchronous, tuned", "GeoSGD, K = 400"
_TAIL = 0.2
"""Share of a curve, at its end, whose mean is the loss that it reaches."""


def tables(entries: Sequence[Entry], *, with_void: bool = False) -> None:
    """Print all. ``with_void``: what does not count as well, which is then said first."""
    if with_void:
        print("MEASUREMENTS THAT DO NOT COUNT ARE IN THESE TABLES\n")
    for entry in entries:
        if entry["kind"] == "ground":
            worst = max(abs(link["error"]) for link in entry["links"])
            where = f"{entry['machine']['processor']}, {entry['machine']['cores']} cores, {entry['machine']['system']}"
            built = f"{entry['hosts']} hosts, links within {worst:.1%}"
            print(f"# {entry['part']}: {entry['started']}, {where}, commit {entry['commit']}; {built}")
    for part, show in (("queue", _queue), ("modes", _modes), ("speed", _speed), ("learn", _learn)):
        found = [entry for entry in entries if entry["part"] == part and entry["kind"] != "ground"]
        if found:
            print(f"\n{part}: {sum(not entry['counts'] for entry in found)} of {len(found)} measurements are void\n")
            show([entry for entry in found if entry["counts"] or with_void])


def _queue(entries: Sequence[Entry]) -> None:
    print(
        "| load | round | trainers | measured steps/s | simulated | ratio | bound: N / (think + service) | 1 / service | measured / bound "
        f"| staleness, measured | simulated | total variation | holds |\n|{'---|' * 13}"
    )
    for entry in entries:
        if entry["kind"] != "row":
            continue
        measured, ratio = entry["measured"]["steps_per_s"], entry["throughput_ratio"]
        first, second = entry["bounds_steps_per_s"]
        predicted_age, age = entry["mean_staleness"]
        holds = abs(ratio - 1) <= 0.05 and entry["total_variation"] <= 0.05
        note = "" if entry["calibration_counts"] else ", with a void calibration"
        print(
            f"| {entry['load']} | {entry['round']} | 4{', closed' if entry['closed'] else ''} | {measured:.1f} "
            f"| {entry['simulated']['steps_per_s']:.1f} | {ratio:.3f} | {first:.1f} | {second:.1f} "
            f"| {measured / entry['bound_steps_per_s']:.2f} | {age:.2f} | {predicted_age:.2f} "
            f"| {entry['total_variation']:.3f} | {'yes' if holds else 'NO'}{note} |"
        )
    print(f"\n| load | round | latency of a message, ms | a server's work, ms | a trainer's, ms | round trip alone, ms |\n|{'---|' * 6}")
    for entry in entries:
        if entry["kind"] == "alone" and entry["closed"]:
            values = [f"{entry['constants'][name] * 1e-6:.2f}" for name in ("message_ns", "service_ns", "extra_ns", "round_trip_ns")]
            print(f"| {entry['load']} | {entry['round']} | {' | '.join(values)} |")


def _modes(entries: Sequence[Entry]) -> None:
    print(
        "| load | mode | round | measured steps/s | simulated | ratio | simulated, other draws | trainers' waiting, ms a step | simulated "
        "| difference, of the step | pushes to a server | simulated | staleness, measured | simulated | total variation | holds |\n"
        f"|{'---|' * 16}"
    )
    for entry in entries:
        if entry["kind"] != "row":
            continue
        measured, predicted = entry["measured"], entry["simulated"]
        predicted_age, age = entry["mean_staleness"]
        least, most = entry["simulated_steps_per_s"]
        holds = max(abs(entry["throughput_ratio"] - 1), abs(entry["wait_error_of_step"]), entry["total_variation"] / 2) <= 0.05
        if entry["saturates"]:
            holds = least <= measured["steps_per_s"] <= most
        note = "" if entry["calibration_counts"] else ", with a void calibration"
        print(
            f"| {entry['load']} | {entry['case']} | {entry['round']} | {measured['steps_per_s']:.1f} | {predicted['steps_per_s']:.1f} "
            f"| {entry['throughput_ratio']:.3f} | {least:.1f} to {most:.1f} "
            f"| {1e3 * measured['wait_s']:.1f} | {1e3 * predicted['wait_s']:.1f} "
            f"| {entry['wait_error_of_step']:+.1%} | {measured['pushes']:.0f} | {predicted['pushes']:.0f} "
            f"| {age:.2f} | {predicted_age:.2f} | {entry['total_variation']:.3f} | {'yes' if holds else 'NO'}{note} |"
        )
    print(f"\n| load | mode | round | latency of a message, ms | a server's work, ms | a trainer's, ms | late by p95, ms |\n|{'---|' * 7}")
    for entry in entries:
        if entry["kind"] == "alone":
            values = [f"{entry['constants'][name] * 1e-6:.2f}" for name in ("message_ns", "service_ns", "extra_ns")]
            late = f"{1e3 * entry['measured']['late_s']['step_p95']:.2f}"
            print(f"| {entry['load']} | {entry['case']} | {entry['round']} | {' | '.join([*values, late])} |")


def _speed(entries: Sequence[Entry]) -> None:
    print("| mode | dimension | n | examples/s and trainer: median [range] |\n|---|---|---|---|")
    together: dict[tuple[str, int], dict[int, float]] = {}
    for mode, dimension in dict.fromkeys((entry["mode"], entry["dimension"]) for entry in entries):
        own = [entry for entry in entries if (entry["mode"], entry["dimension"]) == (mode, dimension)]
        rates = [trainer["examples_per_s"] for entry in own for trainer in entry["trainers"]]
        print(f"| {mode} | {dimension} | {len(own)} | {statistics.median(rates):,.0f} [{min(rates):,.0f}, {max(rates):,.0f}] |")
        together[mode, dimension] = {entry["round"]: sum(trainer["examples_per_s"] for trainer in entry["trainers"]) for entry in own}
    print()
    for dimension in dict.fromkeys(entry["dimension"] for entry in entries):
        print(f"dimension {dimension}: pulls alone allow {pull_bound(dimension):,.0f} examples/s and trainer in an asynchronous mode")
    for dimension in dict.fromkeys(entry["dimension"] for entry in entries):
        ours, rival = (together.get((mode, dimension), {}) for mode in (GEO, TUNED))
        rounds = sorted(ours.keys() & rival.keys())
        if len(rounds) > 1:  # times, so the rival's comes first
            ratio = paired_speedup([1 / rival[number] for number in rounds], [1 / ours[number] for number in rounds])
            print(f"dimension {dimension}: {GEO} over {TUNED}: {ratio}, n = {len(rounds)} pairs")
        elif rounds:
            print(f"dimension {dimension}: {GEO} over {TUNED}: {ours[rounds[0]] / rival[rounds[0]]:.2f}x, one pair")


def pull_bound(dimension: int, rate_bps: float = 200e6) -> float:
    """Examples a second and trainer, where two trainers' pulls share a server's link and nothing else takes time.

    No mode that reads a step's rows as the server holds them makes more, however well it overlaps.
    """
    chance = np.arange(1, 20_001) ** -1.3  # Zipf, as fleetbench.workloads.data.words draws
    words, contexts = 100.0, 600.0
    rows = sum(float(-np.expm1(draws * np.log1p(-chance / chance.sum())).sum()) for draws in (words, contexts))
    return 100 * rate_bps * PAYLOAD_SHARE / 8 / (2 * rows * 4 * dimension)


def _learn(entries: Sequence[Entry]) -> None:
    print(
        "Held-out loss of the server's parameters by learning rate, seed 0\n\n| dimension | mode | s | rate | loss |\n|---|---|---|---|---|"
    )
    for entry in entries:
        if entry["kind"] == "tried":
            print(f"| {entry['dimension']} | {entry['mode']} | {_seconds(entry):.1f} | {entry['rate']:g} | {entry['held_out']:.4f} |")
    print(
        "\n| dimension | seed | GeoSGD: s | held-out loss | a trainer's own copy | rival | rate | s | held-out loss | no worse "
        f"| loss on unseen batches that the asynchronous mode reaches | its time, s | GeoSGD's, s | ratio |\n|{'---|' * 14}"
    )
    rows = [entry for entry in entries if entry["kind"] == "row"]
    for dimension, seed in dict.fromkeys((entry["dimension"], entry["seed"]) for entry in rows):
        # A rival that trained again at a better rate stands behind its first row, and takes its place.
        pair = {entry["mode"] == GEO: entry for entry in rows if (entry["dimension"], entry["seed"]) == (dimension, seed)}
        if len(pair) < 2:
            continue
        geo, rival = pair[True], pair[False]
        equal = geo["held_out"] <= rival["held_out"] and 3 * _seconds(geo) <= 1.01 * _seconds(rival)
        curve = _curve(rival)
        tail = [loss for at, loss in curve if at >= (1 - _TAIL) * curve[-1][0]]
        target = statistics.mean(tail)
        times = [_reaches(_curve(entry), target) for entry in (rival, geo)]
        spelled = ["never" if time_s is None else f"{time_s:.1f}" for time_s in times]
        ratio = f"{times[0] / times[1]:.2f}" if times[0] and times[1] else "-"
        print(
            f"| {dimension} | {seed} | {_seconds(geo):.1f} | {geo['held_out']:.4f} | {geo['trainers'][0]['own_held_out']:.4f} "
            f"| {rival['mode']} | {rival['rate']:g} | {_seconds(rival):.1f} | {rival['held_out']:.4f} "
            f"| {'yes' if equal else 'NO'} | {target:.4f} | {spelled[0]} | {spelled[1]} | {ratio} |"
        )


def _seconds(entry: Entry) -> float:
    return max(float(trainer["seconds"]) for trainer in entry["trainers"])


def _curve(entry: Entry) -> list[tuple[float, float]]:
    """Times and losses of trainer 0, each loss the mean of the last tenth of the points up to there."""
    points = entry["trainers"][0]["curve"]
    width = max(1, len(points) // 10)
    return [(points[end - 1][0], statistics.mean(loss for _, loss in points[end - width : end])) for end in range(width, len(points) + 1)]


def _reaches(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    return next((at for at, loss in curve if loss <= target), None)
