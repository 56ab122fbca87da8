"""Print the tables of README.md from ``raw.jsonl``, and draw ``learned.png``: ``python reports/server_learning/tables.py [RAW]``.

What is asked was written down before the first run: in the mean over seeds a distributed mode is no worse than the single
process's mean by more than its standard deviation over seeds (Word2Vec); its AUC is within 0.005 of the
single process's, and at most 0.01 below the planted one (Wide & Deep).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from pairs import NEAR, SHOWN
from scipy import stats
from tasks import ALONE, MODES

HERE = Path(__file__).parent
OF_SINGLE, OF_PLANTED = 0.005, 0.01
"""AUC of Wide & Deep: how far from the single process's, and below the planted one."""

Entry = dict[str, Any]
Arms = dict[tuple[str, str], dict[int, Entry]]
Score = Callable[[Entry], float]
LOSS: Score = lambda learned: float(learned["loss"])  # noqa: E731  # named as the others are
HITS: Score = lambda learned: float(learned["pairs"]["hits"])  # noqa: E731
RANK: Score = lambda learned: float(learned["pairs"]["rank"])  # noqa: E731
SHORT: Score = lambda learned: float(learned["best_auc"] - learned["auc"])  # noqa: E731


def main(path: Path) -> None:
    """Tables, and the figure."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    words, clicks = ([one for one in found if one["task"] == task] for task in ("word2vec", "wide_deep"))
    for name, entries, table in (("Word2Vec", words, of_words), ("Wide & Deep", clicks, of_clicks)):
        if entries:
            print(f"\n## {name}\n")
            tried(entries)
            table(arms_of(entries))
            equations(entries)
            lags(entries)
    if words and clicks:
        draw(arms_of(words), arms_of(clicks)).savefig(HERE / "learned.png", dpi=130)


def arms_of(entries: Sequence[Entry], kind: str = "run") -> Arms:
    """Mode and whose copy it is, to what each seed learned."""
    runs = [one for one in entries if one["kind"] == kind]
    arms: Arms = {}
    for mode in MODES:
        for whose in ("own", "server", "trainer 0"):
            held = {one["seed"]: one["copies"][whose] for one in runs if one["mode"] == mode and whose in one["copies"]}
            if held:
                arms[mode, whose] = held
    return arms


def equations(entries: Sequence[Entry]) -> None:
    """The loss that each mode's equations reach by themselves, beside the runs' from the same seeds."""
    ran, by_themselves = arms_of(entries), arms_of(entries, "reference")
    if by_themselves:
        print(
            "\n| mode | parameters of | seeds | held-out loss of the equations | of the servers | of the single process |"
            "\n|---|---|---|---|---|---|"
        )
    for key, arm in by_themselves.items():
        losses = [mean(LOSS(held[seed]) for seed in arm) for held in (arm, ran[key], ran[ALONE, "own"])]
        print(f"| {key[0]} | {key[1]} | {len(arm)} | {' | '.join(f'{loss:.4f}' for loss in losses)} |")
    for mode in MODES:
        curves = [one["losses"] for one in entries if one["kind"] == "reference" and one["mode"] == mode and one["losses"]]
        if curves:
            curve = [mean(losses) for losses in zip(*curves, strict=True)]
            print(f"\n{mode}, the equations' server: behind epoch 12 and on " + ", ".join(f"{loss:.4f}" for loss in curve[11:]))


def tried(entries: Sequence[Entry]) -> None:
    """Learning rates and epochs, and the loss of each."""
    for one in entries:
        if one["kind"] == "tried":
            least = min(one["losses"])
            print(f"learning rate {one['rate']:g}: least held-out loss {least:.4f}, behind epoch {1 + one['losses'].index(least)}")
    ran = next(one for one in entries if one["kind"] == "run" and one["mode"] == ALONE)
    print(f"chosen: {ran['rate']:g}, {ran['epochs']} epochs\n")


def lags(entries: Sequence[Entry]) -> None:
    """Of what the server was pushed: how many, and how many updates old, in the mean over all seeds."""
    print()
    for mode in MODES:
        servers = [one["server"] for one in entries if one["kind"] == "run" and one["mode"] == mode and one["server"]]
        if servers:
            lag = mean(sum(int(lag) * num for lag, num in one["staleness"].items()) / sum(one["staleness"].values()) for one in servers)
            print(f"{mode}: {mean(one['updates'] for one in servers):,.0f} updates, mean staleness {lag:.2f}")


def against(arm: dict[int, Entry], alone: dict[int, Entry], score: Score) -> tuple[float, float]:
    """The mean over seeds of an arm's score less the single process's, and half of its 95 % interval, paired by seed."""
    seeds = sorted(arm.keys() & alone.keys())
    differences = [score(arm[seed]) - score(alone[seed]) for seed in seeds]
    half = stats.t.ppf(0.975, len(seeds) - 1) * stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
    return mean(differences), float(half)


def stdev(values: Iterable[float]) -> float:
    """Of a sample; not known of one value."""
    held = list(values)
    return statistics.stdev(held) if len(held) > 1 else math.nan


def of_words(arms: Arms) -> None:
    """Word2Vec: loss and neighbours."""
    alone = arms[ALONE, "own"]
    print(
        "| mode | parameters of | held-out loss | less the single process's [95 %] | no worse "
        f"| partners among {NEAR} nearest | less the single process's [95 %] | no worse "
        "| partners' mean place | strangers: among the nearest, mean place |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for (mode, whose), arm in arms.items():
        cells = []
        for score, sign, shown in ((LOSS, 1, "{:.4f}"), (HITS, -1, "{:.3f}")):
            values = [score(learned) for learned in arm.values()]
            cells.append(f"{shown.format(mean(values))} ± {shown.format(stdev(values))}")
            if mode == ALONE:
                cells += ["", ""]
                continue
            more, half = against(arm, alone, score)
            spread = stdev(score(learned) for learned in alone.values())
            cells.append("{0} [{0}, {0}]".replace("{0}", shown.replace(":", ":+")).format(more, more - half, more + half))
            cells.append(verdict(sign * more, spread))
        strangers = [learned["strangers"] for learned in arm.values()]
        cells.append(f"{mean(RANK(learned) for learned in arm.values()):.0f}")
        cells.append(f"{mean(one['hits'] for one in strangers):.3f}, {mean(one['rank'] for one in strangers):.0f}")
        print(f"| {mode} | {whose} | {' | '.join(cells)} |")
    first = min(alone)
    print(f"\nNearest, seed {first}, of {next(iter(alone.values()))['words']:,} words:\n")
    shown_arms = {key: arm[first]["nearest"] for key, arm in arms.items() if key[1] != "trainer 0"}
    print("| word | " + " | ".join(mode for mode, _ in shown_arms) + " |\n" + "|---" * (1 + len(shown_arms)) + "|")
    for word in SHOWN:
        print(f"| {word} | " + " | ".join(" ".join(near[word]) for near in shown_arms.values()) + " |")


def of_clicks(arms: Arms) -> None:
    """Wide & Deep: AUC."""
    alone = arms[ALONE, "own"]
    print(
        f"| mode | parameters of | AUC | below planted, mean [worst] | at most {OF_PLANTED} "
        f"| AUC less the single process's [95 %] | within {OF_SINGLE} | held-out loss |\n|---|---|---|---|---|---|---|---|"
    )
    for (mode, whose), arm in arms.items():
        short = [SHORT(learned) for learned in arm.values()]
        cells = [f"{mean(learned['auc'] for learned in arm.values()):.4f}", f"{mean(short):.4f} [{max(short):.4f}]"]
        cells.append("yes" if mean(short) <= OF_PLANTED else "NO")
        if mode == ALONE:
            cells += ["", ""]
        else:
            more, half = against(arm, alone, SHORT)
            cells.append(f"{-more:+.4f} [{-more - half:+.4f}, {-more + half:+.4f}]")
            cells.append("yes" if abs(more) <= OF_SINGLE else "NO")
        losses = [LOSS(learned) for learned in arm.values()]
        print(f"| {mode} | {whose} | {' | '.join(cells)} | {mean(losses):.4f} |")
    planted = [learned["best_auc"] for learned in alone.values()]
    print(f"\nplanted AUC: {mean(planted):.4f} [{min(planted):.4f}, {max(planted):.4f}]")


def verdict(worse: float, spread: float) -> str:
    """Whether something that is so much worse than the single process, in the mean, is within its spread."""
    return "NO" if worse > spread else "yes" if worse >= -spread else "yes: better"


def draw(words: Arms, clicks: Arms) -> Figure:
    """A point a seed, the single process's mean and standard deviation as a band, and what is asked of the AUC as a line."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    shown: list[tuple[Any, Arms, Score, str]] = [
        (panels[0], words, LOSS, "held-out loss"),
        (panels[1], words, HITS, f"share of partners among the {NEAR} nearest"),
        (panels[2], clicks, SHORT, "planted AUC less AUC"),
    ]
    keys = [key for mode in MODES for key in dict.fromkeys((*clicks, *words)) if key[0] == mode]
    for axes, arms, score, title in shown:
        own = [score(learned) for learned in arms[ALONE, "own"].values()]
        label = "single process, mean and standard deviation"
        axes.axvspan(mean(own) - stdev(own), mean(own) + stdev(own), color="#9fb8d0", alpha=0.5, lw=0, label=label)
        for place, key in enumerate(keys):
            if key not in arms:
                continue
            values = [score(learned) for learned in arms[key].values()]
            axes.plot(values, [place] * len(values), "o", color="#1f4e79", alpha=0.6, ms=5, label="a seed" if place == 0 else None)
            axes.plot([mean(values)], [place], "|", color="#c44e35", ms=18, mew=2, label="mean of the seeds" if place == 0 else None)
        axes.set(title="Wide & Deep" if arms is clicks else "Word2Vec", xlabel=title)
        axes.grid(axis="x", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].axvline(OF_PLANTED, color="#c44e35", ls="--", lw=1, label="asked: at most")
    names = {"own": "", "server": ": server", "trainer 0": ": trainer 0"}
    panels[0].set_yticks(range(len(keys)), [mode + names[whose] * mode.startswith("GeoSGD") for mode, whose in keys])
    panels[0].invert_yaxis()
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "raw.jsonl")
