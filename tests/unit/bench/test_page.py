"""The page: everything in one file, and nothing that a model id or a reason could smuggle in."""

import base64
import re
from datetime import UTC, datetime
from io import StringIO
from xml.etree import ElementTree

from rich.console import Console

from outrider.bench.page import page
from outrider.bench.plots import figures
from outrider.bench.report import Machine, Memory, NotMeasured, Report, Served, Settings
from outrider.bench.runner import Run
from outrider.bench.sample import Sample
from outrider.bench.services import PLAIN, SPECULATIVE
from outrider.bench.tables import summary_table
from outrider.v1 import orchestrator_pb2 as pb
from tests.unit.bench.test_summary import cell, reports, sample

SVG = "{http://www.w3.org/2000/svg}"


def a_report(*, rounds: bool = True, target: str = "model <b>") -> Report:
    made = (
        [pb.Round(drafted=4, accepted=2, target_passes=1, verify_micros=900, draft_wait_micros=100)] if rounds else []
    )
    ours = cell(SPECULATIVE, Run(1.0, (sample((1, 2, 3), *made),)))
    plain = cell(PLAIN, Run(1.0, (sample((1, 2, 3)),)))
    return Report(
        created=datetime(2026, 1, 2, tzinfo=UTC),
        machine=Machine(system="s", processor="", cores=2, load_before=None, python="3", torch="2", transformers="5"),
        served=Served(
            outrider="1",
            address="",
            target=target,
            drafts=["d"],
            dtype="float32",
            target_threads=1,
            draft_threads=1,
        ),
        settings=Settings(
            max_tokens=3,
            ignore_eos=False,
            temperature=0,
            seed=None,
            acceptance="",
            repeats=1,
            concurrencies=[1],
            prompts={"set": 2},
        ),
        cells=reports(ours, plain),
        not_measured=[NotMeasured(prompt_set="set", concurrency=4, way="loop", reason="one <i>session")],
        memory=[Memory(service="target", peak_bytes=5 << 20)],
    )


def test_page_holds_everything_and_asks_for_nothing() -> None:
    text = page(a_report())
    assert "model &lt;b&gt;" in text
    assert "one &lt;i&gt;session" in text
    assert not re.search(r"<script|<link|@import|url\(", text)
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    for source in sources:
        root = ElementTree.fromstring(base64.b64decode(source.partition(",")[2]))
        assert root.tag == f"{SVG}svg"
    for words in ("Speed", "Latency", "Rounds", "Peak memory", "Not measured", "closed form", "waiting for the block"):
        assert words in text


def test_figures_without_numbers_are_left_out_and_the_same_report_gives_the_same_bytes() -> None:
    assert figures(a_report()) == figures(a_report())
    assert [title for title, _ in figures(a_report(rounds=False))] == [
        "Throughput against concurrency",
        "Latency against concurrency",
    ]


def test_report_survives_its_json() -> None:
    report = a_report()
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_answers_without_tokens_are_shown() -> None:
    ours = cell(SPECULATIVE, Run(1.0, (Sample(0, seconds=0.5),)))
    report = a_report().model_copy(update={"cells": reports(ours, cell(PLAIN, Run(1.0, (sample((1,)),))))})
    assert "–" in page(report)


def test_summary_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(summary_table(a_report()))
    text = console.export_text()
    for head in ("prompts", "tokens/s", "range", "plain", "first", "pass", "α", "same"):
        assert head in text
    assert "…" not in text
