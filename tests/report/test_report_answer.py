"""What a tuning says, in the order in which a reader wants it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from fleetbench.report.answer import answer_of, text_of
from fleetbench.report.model import read_report
from fleetbench.strategy import DistributedStrategy
from tuner.notes import left_out
from tuner.recommendation import Arm, Recommendation, TargetCheck

FUSED = DistributedStrategy(fuse_grad_size_in_MB=0.5)
DILOCO = DistributedStrategy().replace(localsgd=True, lr_scale=2.0, localsgd_configs={"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9})


def said(found: Recommendation, folder: Path, width: int = 120) -> str:
    """On a terminal."""
    found.save(folder)
    report = read_report(folder)
    assert report.tune is not None
    return text_of(report.tune.answer, width)


def to_target(found: Recommendation) -> Recommendation:
    """The same with a target that the finalist, DiLoCo, reaches sooner in five runs each."""
    default = dataclasses.replace(found.arms[0], target=TargetCheck(reached=True, updates=(140.0, 146.0, 150.0, 141.0, 160.0), time_s=1.98))
    own = Arm(
        name="candidate 2",
        strategy=DILOCO,
        simulated_s=0.0084,
        measured_s=(0.008, 0.0088),
        measured_runs=("fused",),
        ratio=0.8,
        target=TargetCheck(reached=True, updates=(36.0, 35.0, 40.0, None, 37.0), time_s=0.34),
    )
    target = {"target_loss": 0.35, "to_target": 5.5, "to_target_low": 4.3, "to_target_high": 7.1, "seeds": 5}
    return dataclasses.replace(found, strategy=DILOCO, arms=(default, own), caveat="lr_scale = 2 alone needs 2.1x fewer steps", **target)  # type: ignore[arg-type]  # fields


def test_the_verdict_is_first_and_every_figure_says_what_it_rests_on(tuned: Path, recommendation: Recommendation) -> None:
    """By hand: 1.25 times as fast than the geometric mean of 10 and 12 ms; means of 4 seeds, times a step; 5.5 is 4.4 x 1.25.

    Steps of 8, 10, 10 and 12 ms, and of 7 and 9 ms, in all of which 1.5 ms are exchanges after the backward.
    """
    lines = said(to_target(recommendation), tuned).splitlines()
    assert lines[0] == "USE  DiLoCo, K = 4 and an outer optimizer at 2 times the learning rate"
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[2:6]] == [
        ["today", "recommended", "gain (90 %)"],
        ["time to loss 0.35", "1.63 s", "323.8 ms", "5.50x [4.30, 7.10]", "4 of 5 seeds; the gain counts the others as bounds"],
        ["steps to loss 0.35", "149", "37", "4.40x"],
        ["time per step", "10.95 ms", "8.76 ms", "1.25x [1.20, 1.30]", "2 pairs"],
    ]
    text = " ".join(" ".join(lines[6:]).split())
    for phrase in (
        "why 5.50x is 4.40x in steps times 1.25x in time per step; communication that no compute hides is 15 % of today's step",
        " and 19 % of the recommended one; K = 4",
        "K = 4 exchanges once in 4 steps note lr_scale = 2 alone needs 2.1x fewer steps",
        f"use it {tuned / 'recommended.md'} says how, in plain PyTorch where it can; call fleet.synchronize() before evaluation",
        "noise the default's own legs differ by 13 %, the pairs by 2 %",
        f"details {tuned / 'report.html'}: 3 strategies simulated, 2 of them run for real",
    ):
        assert phrase in text, phrase


def test_the_readmes_figures_are_those_of_its_recorded_tuning(tmp_path: Path) -> None:
    """Every line of the table; the columns' ratio is the gain: 2.99 s / 0.948 s, which is (158 / 82) times (18.94 / 11.56)."""
    root = Path(__file__).parents[2]
    shutil.copy(root / "reports" / "quickstart" / "demo.json", tmp_path / "recommendation.json")
    lines = text_of(answer_of(Recommendation.load(tmp_path), tmp_path, pd.DataFrame()), 100).splitlines()
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines[:6]) in readme
    assert [line.split()[4:8] for line in lines[3:5]] == [["2.99", "s", "947.5", "ms"], ["158", "82", "1.93x"]]
    assert "why 3.16x is 1.93x in steps times 1.64x in time per step" in " ".join(" ".join(lines).split())


def test_every_strategy_that_ran_says_why_it_is_not_chosen(tuned: Path, recommendation: Recommendation) -> None:
    """Rejected, in the notes, slower than the best or the default by what ranked it, or not ranked."""
    ranked = {"late": 1.3, "slow": 0.9, "alike": 0.81, "next": 0.7, "unranked": None}
    arms = [Arm(name=name, strategy=FUSED, simulated_s=0.01, ratio=ratio, expected=ratio) for name, ratio in ranked.items()]
    best = dataclasses.replace(recommendation.arms[2], ratio=0.9, expected=0.8)
    note = left_out("alike, another", "stood back for candidate 2", "it may be chance")
    found = dataclasses.replace(recommendation, arms=(*recommendation.arms[:2], best, *arms), told=(note,))
    found.save(tuned)
    report = read_report(tuned)
    assert report.tune is not None
    reasons = {
        "candidate 1": "misses the target",
        "late": "no faster: 1.30 times the default's step is expected",
        "slow": "not compared in pairs: 0.90 times the default's step is expected",
        "alike": "stood back for candidate 2: it may be chance",
        "next": "not compared in pairs: 0.70 times the default's step is expected",
        "unranked": "measuring ended before it was ranked",
    }
    assert dict(report.tune.answer.not_chosen) == reasons
    kept = dataclasses.replace(found, verdict="KEEP DEFAULT", undecided=True, strategy=DistributedStrategy())
    assert dict(answer_of(kept, tuned, pd.DataFrame()).not_chosen)["candidate 2"] == "undecided: 1.25x [1.20, 1.30]"


def test_each_seed_has_its_runs_to_the_target(tuned: Path, recommendation: Recommendation) -> None:
    """By hand: a step takes the geometric mean of 10 and 12 ms, 10.954 ms, and 1.25 times less; a run that did not arrive has no time."""
    found = to_target(recommendation)
    found.save(tuned)
    tune = read_report(tuned).tune
    assert tune is not None
    assert tune.answer.seeds[0] == ("0", "140", "1.53 s", "36", "315.5 ms", "4.861x")
    assert tune.answer.seeds[3] == ("3", "141", "1.54 s", "–", "–", "–")  # noqa: RUF001  # as reports write what is missing
    alike = dataclasses.replace(found.arms[1], target=dataclasses.replace(found.arms[0].target, from_arm="default"))  # type: ignore[type-var]
    dataclasses.replace(found, arms=(found.arms[0], alike)).save(tuned)
    tune = read_report(tuned).tune
    assert tune is not None
    assert tune.answer.seeds == ()


@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_on_a_narrow_terminal(tuned: Path, recommendation: Recommendation, width: int) -> None:
    """Words are the same at every width, and no line is longer but for a path."""
    found = to_target(recommendation)
    text = said(found, tuned, width)
    assert sorted(text.split()) == sorted(said(found, tuned, 500).split())
    assert all(len(line) <= width or str(tuned) in line for line in text.splitlines())


def test_what_is_undecided_recommends_nothing(tuned: Path, recommendation: Recommendation) -> None:
    """The headline says to keep the default, and that something was tried; without pairs the legs that ranked it stand."""
    arms = (recommendation.arms[0], dataclasses.replace(recommendation.arms[2], ratio=0.84, void_runs=("one",)))
    kept = dataclasses.replace(
        recommendation,
        verdict="KEEP DEFAULT",
        undecided=True,
        reason="the budget ended",
        strategy=DistributedStrategy(),
        pairs=(),
        arms=arms,
    )
    kept = dataclasses.replace(kept, speedup=None, low=None, high=None)
    text = said(kept, tuned)
    assert text.startswith("UNDECIDED  keep the default; tried: ")
    assert "1.19x" in text
    assert "2 legs, no interval" in text
    assert "use it" not in text
    assert "next      tune again while the machine is quiet" in text
    sure = dataclasses.replace(kept, undecided=False, reason="no gain above 2 %")
    assert said(sure, tuned).startswith("KEEP DEFAULT  tried: ")
