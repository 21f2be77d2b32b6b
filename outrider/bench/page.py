"""The report as one HTML file that needs nothing else."""

from base64 import b64encode

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider.bench.plots import figures
from outrider.bench.report import Report
from outrider.bench.tables import facts, tables


def page(report: Report) -> str:
    """The whole file. Figures are embedded as images: their ids cannot clash."""
    environment = Environment(
        loader=PackageLoader("outrider.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    drawn = [(title, b64encode(svg.encode()).decode()) for title, svg in figures(report)]
    template = environment.get_template("report.html.j2")
    return template.render(facts=facts(report), tables=tables(report), figures=drawn)
