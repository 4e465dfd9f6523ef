"""The pages as HTML: one file each, which needs nothing else, with at most `MAX_BYTES`.

All text is escaped by the template, all data by `tojson`. A content security policy lets the page load nothing and run
only the two scripts that it comes with.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_IO, UserError
from ..utils.owned_files import check_owned
from . import sections
from .charts import Chart, Series, chart_data, drawn_charts
from .comparison import Comparison, shared_charts
from .curves import MAX_POINTS
from .run_data import RunData, read_run

PAGE_FILE = "report.html"
MAX_BYTES = 1_000_000
_FOLDER = Path(__file__).parent
_GENERATOR = '<meta name="generator" content="stoker '


def write_report(directory: Path, page: Path | None = None) -> Path:
    """Write the page of a run; return its path.

    Args:
        directory: the run directory.
        page: the file; None writes `report.html` in the run directory.

    Raises:
        UserError: not a run directory, the file is a link, or not a page of this program.
        OSError: it cannot be written.
    """
    run = read_run(directory)
    path = page or directory / PAGE_FILE
    write_page(path, run_page(run), force=False)
    return path


def write_page(path: Path, html: str, *, force: bool) -> None:
    """Write a page; with `force` also over a file that is no page of this program.

    Raises:
        UserError: the file is a link, or not a page of this program.
        OSError: it cannot be written.
    """
    check_owned(path.parent, path.name)
    if path.is_file() and not force:
        with path.open("rb") as file:
            if _GENERATOR.encode() not in file.read(1024):
                raise UserError(f"{path} exists and is not a page of stoker; name another file")
    atomic_write(path, html.encode())


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a page that cannot be written."""
    return UserError(f"cannot write {path}: {error.strerror or error}; name another file with --output", EXIT_IO)


def run_page(run: RunData) -> str:
    """Return the page of a run."""
    return _page(
        "report.html.jinja",
        list(drawn_charts(run.curves)),
        title=run.name,
        overview=sections.overview(run),
        warnings=sections.warnings(run),
        mfu_peak=run.public(str(run.record.get("mfu_peak", ""))),
        memory=sections.memory(run),
        attention=sections.attention(run),
        experts=sections.experts(run),
        timeline=sections.timeline(run),
        sample=sections.sample(run),
        preset=run.public(str(run.record.get("preset", ""))),
        differences=sections.key_table(run, "differences"),
        configuration=sections.key_table(run, "keys"),
        environment=sections.environment(run),
        events=sections.events(run),
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page of several runs."""
    return _page("compare.html.jinja", list(shared_charts(comparison)), title="Comparison of runs", compared=comparison)


def _page(template: str, charts: Sequence[tuple[Chart, list[Series]]], **values: Any) -> str:
    """Fill a template, with fewer points a line and without the largest images if the page would be too large."""
    lines = max(1, sum(len(series) for _, series in charts))
    limit = max(64, min(MAX_POINTS, 40_000 // lines))
    while True:
        html = _filled(template, [chart_data(chart, series, limit) for chart, series in charts], values)
        if len(html.encode()) <= MAX_BYTES or limit < 16:
            return html
        limit //= 2
        values |= {"timeline": ""} if limit < 200 and "timeline" in values else {}


def _filled(template: str, charts: list[dict[str, Any]], values: dict[str, Any]) -> str:
    library, script = _asset("uplot/uPlot.iife.min.js"), _asset("templates/report.js")
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in (library, script))
    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            charts=charts,
            data={"charts": charts, "experts": (values.get("experts") or {}).get("layers", [])},
            policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}",
            style=_asset("uplot/uPlot.min.css") + _asset("templates/report.css"),
            license=_asset("uplot/LICENSE"),
            library=library,
            script=script,
        )
    )


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(_FOLDER / "templates")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["breakable"] = lambda key: escape(key).replace("_", Markup("_<wbr>")).replace(".", Markup(".<wbr>"))
    return found


def _asset(name: str) -> Markup:
    """Return a file of this package, which needs no escaping."""
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
