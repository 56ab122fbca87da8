"""Page: one HTML file that needs no network. Every kind of page fills the frame of page.html."""

from __future__ import annotations

from importlib import resources

import jinja2

from fleetbench.report import units

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
