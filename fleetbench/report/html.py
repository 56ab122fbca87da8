"""Pages: a tuning, a run or a profile in one HTML file that needs no network."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from fleetbench.digests import write_whole
from fleetbench.report import figures, units
from fleetbench.report.model import DEFAULT, Report, StepsView, read_report

_SPELLINGS = (units.milliseconds, units.seconds, units.percent, units.number, units.ratio, units.size)


def render_page(template: str, **content: object) -> str:
    """The text of the page that a template of this package makes of its content."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: resources.files("fleetbench.report").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for spell in _SPELLINGS:
        environment.filters[spell.__name__] = spell
    return environment.get_template(template).render(**content)


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a tuning or of a run, whole or not at all, and return its path.

    Raises ``ConfigError`` for a folder that is neither, and ``EnvironmentLacks`` where the disk refuses.
    """
    folder = Path(folder)
    page = render(read_report(folder))
    path = folder / "report.html"
    write_whole(path, page)
    return path


def render(report: Report) -> str:
    """The page's text."""
    return render_page("report.html", report=report, tune=report.tune, pictures=_pictures(report), dash=units.NONE)


def _pictures(report: Report) -> list[tuple[str, str, str]]:
    """Title, caption and ``data:`` URI of every figure that the data allow."""
    drawn: list[tuple[str, str, Figure]] = []
    tune = report.tune
    if tune is not None and tune.pairs:
        figure = figures.paired_speedups(tune.pairs, tune.recommendation.low, tune.recommendation.high, 1.0 + tune.min_gain)
        drawn.append(("The pairs behind the verdict", "Each pair is two fresh legs, one of the default and one of the finalist.", figure))
    if tune is not None and tune.arms:
        caption = "The simulator chose the candidates; real processes had the last word."
        drawn.append(("Simulated against real step time", caption, figures.simulated_against_real(tune.arms)))
    compared = _compared(report)
    if compared:
        caption = "A curve further left is faster; a steeper one is steadier."
        drawn.append(("Distribution of step times", caption, figures.step_time_distribution(compared)))
    if report.views:
        caption = (
            "Compute is forward and backward; wait is for the slowest trainer; exposed communication is what the computation did not hide; "
            "update is the optimizer and the merge."
        )
        drawn.append(("Where a step's time goes", caption, figures.time_split(report.views)))
    return [(title, caption, figures.data_uri(figure)) for title, caption, figure in drawn]


def _compared(report: Report) -> list[StepsView]:
    """Real steps of the default and of the finalist (of every arm, where there is none); of a single run, its own."""
    if report.tune is None:
        return list(report.views)
    finalist = report.tune.recommendation.finalist
    return [view for view in report.views if view.executor == "real" and (finalist is None or view.arm in (DEFAULT, finalist))]
