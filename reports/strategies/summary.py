"""The tables and verdicts of README.md, from the raw data alone.

``python reports/strategies/summary.py [RAW]`` prints them. A verdict is PASS where the one-sided 95 % lower
bound of the paired speed-up reaches its threshold, MISS where the one-sided 95 % upper bound does not, and
OPEN where the data do not decide. Pairs are rounds: both arms in one launch, each as the mean of its two blocks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from timing import UNIT_STEPS, mean_step_s, median_step_s

from tuner.sequential import paired_speedup

QUIET_CORES = 0.15
"""Cores that other programs may take during a round that counts."""
PARITY = 1e-3
"""Distance between two arms' parameters, as a share of how far training moved them, that float32 explains anyway."""
ROUNDINGS = 10
"""... and how many times as far apart as DDP trainings that differ by roundings an arm may be behind the first unit."""
NULLS = ("ddp_rounded", "ddp_small")
"""DDP against DDP: a start that is another by one rounding, and sums in another order."""
SHARE = 0.2
PLAN_SHARE = 0.01
PLAN_STEP_S = 0.010

Finding = dict[str, Any]


def read(path: Path) -> list[Finding]:
    """The lines of a file of JSON objects; none where it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def foreign_cores(found: Sequence[Finding]) -> float | None:
    """Cores that other programs took during a round's blocks, on average over time; none without a block."""
    blocks = [finding for finding in found if "step_us" in finding]
    if not blocks:
        return None
    weights = [sum(block["step_us"][0]) for block in blocks]
    return sum(block["foreign_cores"] * weight for block, weight in zip(blocks, weights, strict=True)) / sum(weights)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast one arm is as another; ``low`` and ``high`` are one-sided 95 % bounds."""

    point: float
    low: float | None
    high: float | None

    def verdict(self, threshold: float) -> str:
        """PASS, MISS or OPEN."""
        if self.low is None or self.high is None:
            return "one round"
        if self.low >= threshold:
            return "PASS"
        return "MISS" if self.high < threshold else "OPEN"

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.point:.3f}x{bounds}"


class Cell:
    """One model at one number of ranks."""

    def __init__(self, found: Iterable[Finding], model: str, ranks: int, wanted_rounds: int) -> None:
        self.model = model
        self.ranks = ranks
        self.found = [finding for finding in found if finding.get("model") == model and finding.get("ranks") == ranks]
        self.rounds: dict[int, list[Finding]] = {}
        for finding in self.found:
            if finding["kind"] == "round":
                self.rounds.setdefault(finding["round"], []).append(finding)
        self.foreign = {number: foreign_cores(lines) or 0.0 for number, lines in self.rounds.items()}
        quiet = [number for number, cores in self.foreign.items() if cores <= QUIET_CORES]
        self.counted = sorted(quiet if len(quiet) >= wanted_rounds else self.rounds)
        self.all_quiet = len(quiet) >= wanted_rounds

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.model}, {self.ranks} ranks"

    def blocks(self, arm: str) -> list[list[Finding]]:
        """An arm's blocks of every counted round."""
        return [[line for line in self.rounds[number] if line.get("arm") == arm and "step_us" in line] for number in self.counted]

    def seconds(self, arm: str, of_block: Callable[[Sequence[Sequence[int]]], float] = median_step_s) -> list[float]:
        """Seconds a step of every counted round; empty for an arm that did not run."""
        rounds = self.blocks(arm)
        return [mean(of_block(block["step_us"]) for block in blocks) for blocks in rounds] if all(rounds) else []

    def ratio(self, arm: str, other: str, of_block: Callable[[Sequence[Sequence[int]]], float] = median_step_s) -> Ratio | None:
        """How many times as fast ``arm`` is as ``other``; none where one of them did not run."""
        fast, slow = self.seconds(arm, of_block), self.seconds(other, of_block)
        if not fast or not slow:
            return None
        if len(fast) == 1:
            return Ratio(slow[0] / fast[0], None, None)
        found = paired_speedup(slow, fast)
        return Ratio(found.mean, found.low, found.high)

    def share(self, arm: str) -> float | None:
        """Share of a step that the exchange takes: 1 - time without any exchange / time."""
        alone, together = self.seconds("none"), self.seconds(arm)
        return 1 - median(alone) / median(together) if alone and together else None

    def skipped(self) -> dict[str, str]:
        """Arms that could not run, with their reasons."""
        return {line["arm"]: line["skipped"] for line in self.found if "skipped" in line}


SPEED: tuple[tuple[str, str, float | None, str, tuple[str, ...]], ...] = (
    ("ours", "ddp_tuned", 1.0, "synchronous, tuned DDP", ()),
    ("ours_fused", "ddp_tuned", 1.0, "synchronous flat, tuned DDP", ()),
    ("ours_fused", "ddp_tuned_fused", None, "synchronous flat, tuned DDP with torch's fused update", ()),
    ("ours_tuned", "ddp_tuned", 1.0, "synchronous tuned, tuned DDP", ()),
    ("ours_tuned_fused", "ddp_tuned", 1.0, "synchronous tuned flat, tuned DDP", ()),
    ("ours_tuned_fused", "ddp_tuned_fused", None, "synchronous tuned flat, tuned DDP with torch's fused update", ()),
    ("ours_local", "post_local", 1.3, "K = 4, PostLocalSGDOptimizer in DDP", ("deep",)),
    ("ours_local_fused", "post_local", 1.3, "K = 4 flat, PostLocalSGDOptimizer in DDP", ("deep",)),
    ("ours_local", "post_local_bare", None, "K = 4, PostLocalSGDOptimizer without DDP", ()),
    ("ours_local_fused", "post_local_bare_fused", None, "K = 4 flat, PostLocalSGDOptimizer without DDP, with torch's fused update", ()),
    ("ours_local", "torchft", 5.0, "K = 4, torchft", ("deep",)),
    ("ours_local_fused", "torchft", 5.0, "K = 4 flat, torchft", ("deep",)),
    ("ours_merge", "no_sync", 1.0, "merge k = 4, no_sync", ()),
    ("ours_merge", "no_sync_tuned", None, "merge k = 4, no_sync with tuned DDP", ()),
    ("ours_merge_fused", "no_sync", 1.0, "merge k = 4 flat, no_sync", ()),
)
"""Arm, rival, threshold at 2 ranks, words, models that the threshold holds for (empty: all)."""


def print_summary(found: Sequence[Finding]) -> None:
    """Print all tables as Markdown."""
    header = next(finding for finding in found if finding["kind"] == "header")
    names = dict.fromkeys((line["model"], line["ranks"]) for line in found if line["kind"] == "round")
    cells = [Cell(found, model, ranks, header["rounds"]) for model, ranks in names]
    host, versions = header["machine"], header["versions"]
    where = f"{host['processor']}, {host['cores']} cores, {host['system']}"
    print(f"# Tables\n\nMeasured from {header['started']}: {where}, torch {versions['torch']}, gloo.\n")
    for table in (_glance, _verdicts, _shares, _speeds, _parity, _wire, _plan, _noise):
        table(cells)
    _memory(found)
    for failure in (line for line in found if line["kind"] == "failure"):
        print(f"A launch failed and was repeated: {failure['job']['kind']} of {failure['job']['model']}, {failure['ranks']} ranks.\n")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print()


def _glance(cells: Sequence[Cell]) -> None:
    """The verdicts that the flat update is for, a line a cell."""
    rows = []
    for cell in cells:
        share = cell.share("ddp")
        pairs = [("ours_fused", "ddp", 1.1 if share is not None and share >= SHARE else None), ("ours_fused", "ddp_tuned", 1.0)]
        deep = cell.model == "deep"
        pairs += [("ours_local_fused", "post_local", 1.3 if deep else None), ("ours_local_fused", "torchft", 5.0 if deep else None)]
        pairs += [("ours_merge_fused", "no_sync", 1.0)]
        rows.append((cell.name, *(_short(cell, arm, other, threshold) for arm, other, threshold in pairs)))
    rivals = ("DDP as it comes", "tuned DDP", "K = 4: PostLocalSGDOptimizer in DDP", "K = 4: torchft", "merge k = 4: no_sync")
    _table("Ours with the flat update, beside", ("model", *rivals), rows)


def _short(cell: Cell, arm: str, other: str, threshold: float | None) -> str:
    ratio = cell.ratio(arm, other)
    if ratio is None:
        return "not measured"
    bounds = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    verdict = "" if threshold is None or cell.ranks != 2 else f" {ratio.verdict(threshold)}"
    return f"{ratio.point:.2f}x{bounds}{verdict}"


def _verdicts(cells: Sequence[Cell]) -> None:
    rows: list[Sequence[object]] = []
    for cell in cells:
        share = cell.share("ddp")
        for arm, words in (("ours", "synchronous"), ("ours_fused", "synchronous flat")):
            ratio = cell.ratio(arm, "ddp")
            if share is not None and ratio is not None:
                against = f"{words}, DDP as it comes (share {share:.0%})"
                rows.append(_line(cell, against, ratio, cell.ratio(arm, "ddp", mean_step_s), 1.1 if share >= SHARE else None))
        for arm, other, wanted, words, models in SPEED:
            ratio = cell.ratio(arm, other)
            threshold = wanted if not models or cell.model in models else None
            reason = cell.skipped().get(arm) or cell.skipped().get(other)
            if ratio is not None:
                rows.append(_line(cell, words, ratio, cell.ratio(arm, other, mean_step_s), threshold))
            elif reason is not None:
                rows.append((cell.name, words, "", "", "", f"skipped: {reason}"))
    _table("Verdicts", ("model", "ours against", "speed-up [one-sided 95 % bounds]", "by mean", "threshold", "verdict"), rows)


def _line(cell: Cell, words: str, ratio: Ratio, by_mean: Ratio | None, threshold: float | None) -> Sequence[object]:
    verdict = "none asked" if threshold is None else ratio.verdict(threshold)
    if threshold is not None and not cell.all_quiet:
        verdict = "VOID: too few quiet rounds"
    elif threshold is not None and cell.ranks != 2:
        verdict += " (reported only)"
    return cell.name, words, ratio, f"{by_mean.point:.3f}x" if by_mean else "", threshold or "", verdict


def _shares(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        tuned = next(line["options"] for line in cell.found if line["kind"] == "search" and line["best"])
        chosen = ", ".join(
            f"{key} = {value}" for key, value in tuned.items() if value not in (None, False) or key == "forward_sync_buffers"
        )
        size = next(line["options"]["fuse_grad_size_in_MB"] for line in cell.found if line["kind"] == "search_ours" and line["best"])
        shares = [cell.share(arm) for arm in ("ddp", "ddp_tuned", "ours_tuned", "ours_tuned_fused")]
        alone = f"{1e3 * median(cell.seconds('none')):.2f}" if cell.seconds("none") else ""
        rows.append(
            (cell.name, alone, *("" if share is None else f"{share:.0%}" for share in shares), chosen or "defaults", f"{size:g} MiB")
        )
    columns = ("model", "ms a step without exchange", "DDP", "tuned DDP", "ours tuned", "ours tuned flat", "DDP tuned to", "ours tuned to")
    _table("Share of communication in a step", columns, rows)


def _speeds(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        arms = dict.fromkeys(line["arm"] for line in cell.found if line["kind"] == "round" and "step_us" in line)
        for arm in sorted(arms):
            seconds = cell.seconds(arm)
            if seconds:
                times = [1e3 * second for second in seconds]
                rows.append((cell.name, arm, len(times), f"{median(times):.2f}", f"{min(times):.2f} to {max(times):.2f}"))
        rows += [(cell.name, arm, 0, "skipped", reason) for arm, reason in cell.skipped().items()]
    _table("Milliseconds a step", ("model", "arm", "rounds", "median over rounds", "range"), rows)


def _parity(cells: Sequence[Cell]) -> None:
    rows: list[Sequence[object]] = []
    for cell in cells:
        lines = [line for lines in cell.rounds.values() for line in lines if "parity" in line]
        bound = max(PARITY, ROUNDINGS * max(line["early"] for line in lines if line["parity"] in NULLS))
        for name, other in dict.fromkeys((line["parity"], line["equals"]) for line in lines):
            of_arm = [line for line in lines if line["parity"] == name]
            early, end = (max(line[when] for line in of_arm) for when in ("early", "distance"))
            if name == "none":
                nearest = min(line["early"] for line in of_arm)
                verdict = "differs, as it must" if nearest > bound else "NO CONTROL"
                rows.append((cell.name, "no exchange (control)", other, f"{nearest:.1e}", "", "", verdict))
                continue
            agree = all(line["agree"] for line in of_arm)
            same = early <= bound and (end <= PARITY or of_arm[0]["batch_norm"]) and agree
            verdict = "DDP's own spread" if name in NULLS else "PASS" if same else "MISS"
            rows.append((cell.name, name, other, f"{early:.1e} (at most {bound:.1e})", f"{end:.1e}", agree, verdict))
    columns = ("model", "arm", "against", "behind the first unit", "at the end", "all ranks the same bits", "verdict")
    _table("Parity in the same run, worst round", columns, rows)


def _wire(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        buckets = {line["arm"]: len(line["bucket_bytes"]) for line in cell.found if line["kind"] == "plan" and "bucket_bytes" in line}
        for arm in ("ddp", "ddp_tuned", "ours", "post_local", "ours_local", "torchft", "no_sync", "ours_merge", "ours_merge_fused"):
            blocks = [block for blocks in cell.blocks(arm) for block in blocks]
            if not blocks:
                continue
            steps = len(blocks[0]["step_us"][0])
            counts = sorted({block["collectives"] for block in blocks})
            megabytes = median(block["bytes_on_wire"] for block in blocks) / steps / 1e6
            verdict = ""
            if arm.startswith("ours_merge") and arm in buckets:
                verdict = "PASS" if counts == [buckets[arm] * steps // UNIT_STEPS] else "MISS"
            rows.append((cell.name, arm, steps, ", ".join(map(str, counts)), buckets.get(arm, ""), f"{megabytes:.2f}", verdict))
    columns = ("model", "arm", "timed steps", "collectives in them", "buckets", "MB a step on the loopback", "steps/k a bucket")
    _table("On the wire", columns, rows)


def _plan(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        for line in (line for line in cell.found if line["kind"] == "plan" and "plan_s" in line):
            share = line["plan_s"] / line["step_s"]
            verdict = ("PASS" if share < PLAN_SHARE else "MISS") if line["step_s"] >= PLAN_STEP_S else "step below 10 ms"
            rows.append((cell.name, line["arm"], f"{line['calls']:.1f}", f"{1e6 * line['plan_s']:.0f}", f"{share:.2%}", verdict))
    _table("Plan's own calls", ("model", "arm", "calls a step", "us a step", "share of the step", "below 1 %"), rows)


def _noise(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        moved = {}
        for work in ("multiply_s", "copy_s", "all_reduce_s"):
            values = [line[work] for number in cell.counted for line in cell.rounds[number] if "sentinel" in line]
            moved[work] = f"{max(values) / min(values) - 1:.0%}"
        quiet = sum(cores <= QUIET_CORES for cores in cell.foreign.values())
        busy = f"{median(cell.foreign.values()):.2f} / {max(cell.foreign.values()):.2f}"
        note = "" if cell.all_quiet else "not enough quiet rounds: all count"
        rows.append((cell.name, len(cell.rounds), quiet, busy, *moved.values(), note))
    columns = ("model", "rounds", "quiet", "foreign cores, median / worst", "multiply moved", "copy moved", "all-reduce moved", "")
    _table("Noise: unchanging work before, amid and behind each round, largest over smallest", columns, rows)


def _memory(found: Sequence[Finding]) -> None:
    rows = []
    for model in dict.fromkeys(line["model"] for line in found if line["kind"] == "live"):
        live = {
            line["arm"]: line["peak_bytes"] for line in found if line["kind"] == "live" and line["model"] == model and "peak_bytes" in line
        }
        resident: dict[str, list[int]] = {}
        for line in found:
            if line["kind"] == "resident" and line["model"] == model and "peak_bytes" in line:
                resident.setdefault(line["arm"], []).append(line["peak_bytes"])
        buckets = {
            line["arm"]: line["bucket_bytes"]
            for line in found
            if line["kind"] == "plan" and line["model"] == model and "bucket_bytes" in line
        }
        for arm, peak in live.items():
            over = peak - live["ddp_views"]
            verdict, bucket = "", ""
            if arm in ("ours", "ours_fused") and arm in buckets:
                verdict = "PASS" if over <= max(buckets[arm]) else "MISS"
                bucket = f"{max(buckets[arm]) / 1e6:.2f}"
            process = f"{median(resident[arm]) / 1e6:.1f}" if arm in resident else ""
            rows.append((model, arm, f"{peak / 1e6:.2f}", f"{over / 1e6:+.2f}", bucket, verdict, process))
    columns = (
        "model",
        "arm",
        "peak MB in tensors",
        "over DDP with views",
        "largest bucket MB",
        "at most one bucket over",
        "peak MB of the process",
    )
    _table("Memory of one rank, 2 ranks", columns, rows)


def figure(found: Sequence[Finding], path: Path) -> None:
    """Every arm's time a step, as a share of DDP's: a dot for the median of the rounds, a line for their range."""
    from matplotlib.figure import Figure

    header = next(finding for finding in found if finding["kind"] == "header")
    names = list(dict.fromkeys((line["model"], line["ranks"]) for line in found if line["kind"] == "round"))
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    picture = Figure(figsize=(3.4 * columns, 3.6 * lines), layout="constrained")
    for index, (model, ranks) in enumerate(names):
        cell = Cell(found, model, ranks, header["rounds"])
        axes = picture.add_subplot(lines, columns, index + 1)
        arms = sorted({line["arm"] for line in cell.found if line["kind"] == "round" and "step_us" in line}, reverse=True)
        base = cell.seconds("ddp")
        shown = [arm for arm in arms if cell.seconds(arm) and base]
        for height, arm in enumerate(shown):
            shares = [one / other for one, other in zip(cell.seconds(arm), base, strict=True)]
            colour = "tab:blue" if arm.startswith("ours") else "tab:grey"
            axes.plot([min(shares), max(shares)], [height, height], color=colour)
            axes.plot(median(shares), height, "o", color=colour, markersize=4)
        axes.axvline(1.0, color="black", linewidth=0.5)
        axes.set_yticks(range(len(shown)), shown, fontsize=7)
        axes.set_xlim(left=0)
        axes.set_title(cell.name, fontsize=9)
        axes.set_xlabel("time a step / DDP's", fontsize=8)
    picture.savefig(path, dpi=130)


if __name__ == "__main__":
    print_summary(read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "raw.jsonl"))
