"""The page: self-contained, complete, and safe to open."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from fleetbench.report.html import write_report
from fleetbench.result import RunResult
from fleetbench.store import save_run
from tuner.notes import Remark
from tuner.recommendation import Recommendation


class _Page(HTMLParser):
    """Text, links and open tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    page.text = re.sub(r"\s+", " ", page.text)
    return page


def test_the_page_needs_no_network(tuned: Path) -> None:
    """Every picture is in the page itself, and nothing is loaded from elsewhere."""
    path = write_report(tuned)
    page = _read(path)
    assert path == tuned / "report.html"
    assert all(link.startswith("data:") for link in page.links)
    assert "@import" not in path.read_text(encoding="utf-8")
    assert "script" not in page.tags
    assert page.tags.count("img") == 2


def test_the_page_says_everything_that_the_recommendation_says(tuned: Path, recommendation: Recommendation) -> None:
    """Verdict, arms, reasons, advice, notes, what was skipped, the price of K, and how to use it."""
    text = _read(write_report(tuned)).text
    assert recommendation.line in text
    for arm in recommendation.arms:
        assert arm.name in text
    for phrase in (
        "[1.200, 1.300]",
        "misses the target",
        "use_hierarchical_allreduce is not taken: not executed yet",
        "Left out",
        "profiled at 1 and 2 threads",
        "cluster.inter: launcher local",
        "Without workload.target_loss nothing prices what more local steps cost",
        'strategy = DistributedStrategy.load("recommended.toml")',
        "optimizer = fleet.distributed_optimizer(optimizer)",
        "3 strategies simulated",
        "repeated confidence interval of a group-sequential t test",
        "torch 2.",
    ):
        assert phrase in text, phrase


def test_names_are_escaped(tuned: Path, recommendation: Recommendation) -> None:
    """A name from a file is text, whatever it contains."""
    hostile = "<script>alert(1)</script>"
    dataclasses.replace(recommendation, told=(Remark(text=hostile),)).save(tuned)
    path = write_report(tuned)
    assert "script" not in _read(path).tags
    assert html.escape(hostile) in path.read_text(encoding="utf-8")


def test_a_single_run_has_a_page(tmp_path: Path, make_run: Callable[..., RunResult]) -> None:
    """Its headline, its summary and a picture."""
    saved = save_run(make_run(), tmp_path)
    assert saved.path is not None
    page = _read(write_report(saved.path))
    assert "10.00 ms a step" in page.text
    assert "exposed_comm_s" in page.text
    assert page.tags.count("img") == 1
