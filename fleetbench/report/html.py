"""Report of a tuning or a run: one HTML file that needs no network."""

from contextlib import suppress
from importlib import resources
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from fleetbench import units
from fleetbench.digests import write_whole
from fleetbench.errors import ConfigError
from fleetbench.report import figures
from fleetbench.report.model import Report, TuneView, read_report

_SPELLINGS = (units.milliseconds, units.seconds, units.percent, units.number, units.ratio, units.size, units.changes)


def write_report(folder: Path) -> Path:
    """Write ``report.html`` atomically into the folder of a tuning or of a run, and return its path.

    Raises ``ConfigError`` for a folder that is neither, and ``EnvironmentLacks`` if writing fails.
    """
    return save_report(read_report(Path(folder)), Path(folder))


def save_report(report: Report, folder: Path) -> Path:
    """Write a report that is already read; see ``write_report``."""
    write_whole(path := folder / "report.html", render(report))
    return path


def render(report: Report) -> str:
    """Return the HTML text of a report."""
    shown = {"losses": _losses(report.tune), "pictures": _pictures(report)}
    return page_of("report.html", report=report, tune=report.tune, **shown, dash=units.NONE)


def page_of(template: str, **values: object) -> str:
    """Return the text of a page: a template of this package, filled with ``values``."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {spell.__name__: spell for spell in _SPELLINGS}
    text = resources.files("fleetbench.report").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)


def _losses(tune: TuneView | None) -> str | None:
    """Return a ``data:`` URI of a figure of the losses on the way to the target.

    None if both strategies train the same way, or if losses are missing.
    """
    if tune is None or not tune.to_target or not all(tune.to_target.values()):
        return None
    with suppress(ConfigError):  # emulated trainers have no losses
        return figures.data_uri(figures.loss_against_time(tune.to_target, tune.recommendation.target_loss))
    return None


def _pictures(report: Report) -> list[tuple[str, str, str]]:
    """Return title, caption and ``data:`` URI of every figure that the data allow."""
    drawn: list[tuple[str, str, Figure]] = []
    tune = report.tune
    if tune is not None and tune.recommendation.arms:
        caption = "The simulator chose the candidates; real processes had the last word."
        drawn.append(("Simulated against real step time", caption, figures.simulated_against_real(tune.recommendation.arms)))
    if len(report.splits):
        caption = (
            "Compute is forward and backward; wait is for the slowest trainer; exposed communication is what the computation did not hide; "
            "update is the optimizer and the merge."
        )
        drawn.append(("Where a step's time goes", caption, figures.step_breakdown(report.splits)))
    return [(title, caption, figures.data_uri(figure)) for title, caption, figure in drawn]
