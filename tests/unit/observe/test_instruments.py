"""Instruments in plain Python, the catalogue that lists them, and what a round counts (FAILURES I1, I4, I8)."""

import threading
from collections import Counter as Count

import pytest
from opentelemetry.metrics import CallbackOptions
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from orchestrator.metrics import Metrics
from orchestrator.stats import RoundStats
from orchestrator.tenants import Tenants
from outrider.observe.catalogue import BLOCK, CATALOGUE, of, series
from outrider.observe.export import Exporter
from outrider.observe.instruments import Instruments
from outrider.v1.draft_pb2 import PROPOSER_SUFFIX
from outrider.v1.orchestrator_pb2 import (
    ACCEPTANCE_GREEDY,
    ACCEPTANCE_RATIO,
    PLAIN_REASON_NO_GAIN,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
)
from tests.harness.faults import Counters
from tests.harness.scrape import Scrape


def exported(instruments: Instruments) -> Scrape:
    registry = CollectorRegistry()
    registry.register(instruments)
    return Scrape(generate_latest(registry).decode())


def test_no_two_instruments_share_a_series() -> None:
    names = Count(name for instrument in CATALOGUE for name in instrument.series_names)
    assert [name for name, times in names.items() if times > 1] == []
    assert len(CATALOGUE) == len({instrument.name for instrument in CATALOGUE})


def test_what_a_query_may_select() -> None:
    assert {"outrider_rounds_total", "outrider_wire_bytes_total", "outrider_round_commit_seconds_bucket"} <= series()
    assert "gen_ai_server_request_duration_seconds_count" in series("orchestrator")
    assert "outrider_target_queue" in series("target")
    assert "outrider_target_queue" not in series("draft")
    assert "outrider_target_kv_pages_used" in series("target")


@pytest.mark.parametrize("name", ["outrider.no_such", "outrider.target.passes", "outrider.lookahead"])
def test_nothing_is_counted_that_is_not_listed(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        Instruments("orchestrator").counter(name)


def test_counters_are_read_when_they_are_asked_for() -> None:
    reader = InMemoryMetricReader()
    counter = Instruments("orchestrator", MeterProvider([reader])).counter("outrider.draft_calls")
    assert reader.get_metrics_data() is None
    counter.add(2, "block", 4)
    counter.add(1, "block", 4)
    counter.add(5, "prefix", 0)
    data = reader.get_metrics_data()
    assert data is not None
    points = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert {(tuple((point.attributes or {}).values()), point.value) for point in points} == {
        (("block", 4), 3),
        (("prefix", 0), 5),
    }


def test_a_histogram_has_cumulative_buckets_with_their_bounds_inside() -> None:
    instruments = Instruments("orchestrator")
    lengths = instruments.histogram("outrider.lookahead")
    fresh = exported(instruments)
    fresh.check_numbers()
    assert fresh.sum("outrider_lookahead_count") == 0
    for length in (0, 1, 2, 7, 8, 65):
        lengths.record(length)
    seen = exported(instruments)
    bounds = ("0.0", "1.0", "2.0", "6.0", "8.0", "64.0", "+Inf")
    assert [seen.sum("outrider_lookahead_bucket", le=bound) for bound in bounds] == [1, 2, 3, 3, 5, 5, 6]
    assert (seen.sum("outrider_lookahead_count"), seen.sum("outrider_lookahead_sum")) == (6, 83)


def test_numbers_can_be_read_while_others_come() -> None:
    instruments = Instruments("orchestrator")
    histogram = instruments.histogram("gen_ai.server.time_to_first_token")
    counter = instruments.counter("outrider.draft_calls")

    def count() -> None:
        for index in range(1000):
            histogram.record(0.1, "chat", "outrider", f"model {index}")
            counter.add(1, "block", index)

    thread = threading.Thread(target=count)
    thread.start()
    while thread.is_alive():
        histogram.family()
        counter.read(CallbackOptions())
    assert len(counter.read(CallbackOptions())) == 1000
    assert len([sample for sample in histogram.family().samples if sample.name.endswith("_count")]) == 1000


def test_i1_a_round_counts_its_own_tokens_and_no_more() -> None:
    counters = Counters()
    for accepted, origin in ((0, TOKEN_ORIGIN_RECOVERED), (2, TOKEN_ORIGIN_RECOVERED), (4, TOKEN_ORIGIN_BONUS)):
        stats = RoundStats(10, drafted=4, accepted=accepted)
        counters.metrics.round(stats, accepted + 1, ACCEPTANCE_RATIO, origin)
    found = counters.read()
    assert found["outrider.rounds"] == found[f"outrider.rounds{{{BLOCK}}}"] == found["outrider.drafts"] == 3
    assert (found["outrider.draft_tokens"], found["outrider.accepted_tokens"]) == (12, 6)
    assert found["outrider.emitted_tokens"] == 9
    assert [found[f"outrider.emitted_tokens{{{origin}}}"] for origin in ("ACCEPTED", "RECOVERED", "BONUS")] == [6, 2, 1]
    assert [found[f"outrider.draft_tokens_by_position{{{position}}}"] for position in range(5)] == [3, 3, 3, 3, 0]
    assert [found[f"outrider.accepted_tokens_by_position{{{position}}}"] for position in range(5)] == [2, 2, 1, 1, 0]
    assert found["outrider.trimmed_tokens"] == 0


def test_i1_the_tokens_after_an_end_are_not_emitted() -> None:
    counters = Counters()
    counters.metrics.round(
        RoundStats(10, drafted=4, accepted=3, proposer=PROPOSER_SUFFIX), 2, ACCEPTANCE_GREEDY, TOKEN_ORIGIN_RECOVERED
    )
    found = counters.read()
    assert (found["outrider.emitted_tokens"], found["outrider.emitted_tokens{RECOVERED}"]) == (2, 0)
    assert found["outrider.trimmed_tokens"] == 2
    by_proposer = [
        found[f"outrider.proposer_{name}{{suffix}}"] for name in ("blocks", "draft_tokens", "accepted_tokens")
    ]
    assert by_proposer == [1, 4, 3]
    assert found["outrider.accepted_tokens"] + found["outrider.rounds"] - 2 == 2


def test_i4_rounds_without_blocks_divide_by_nothing() -> None:
    exporter = Exporter("test", "127.0.0.1:0")
    metrics = Metrics(exporter.provider)
    exporter._registry.register(metrics.instruments)
    try:
        Scrape(generate_latest(exporter._registry).decode()).check_numbers()
        stats = RoundStats(10, plain_reason=PLAIN_REASON_NO_GAIN)
        metrics.round(stats, 1, ACCEPTANCE_RATIO, TOKEN_ORIGIN_PLAIN)
        metrics.session_ended(0, 0)
        plain = Scrape(generate_latest(exporter._registry).decode())
    finally:
        exporter.close()
    plain.check_numbers()
    assert plain.sum("outrider_rounds_total", reason="NO_GAIN") == 1
    assert plain.sum("outrider_draft_tokens_total") == plain.sum("outrider_drafts_total") == 0
    assert plain.sum("outrider_request_acceptance_count") == 0


def test_i8_sessions_with_much_or_little_accepted_can_be_told() -> None:
    metrics = Metrics()
    for drafted, accepted in ((15, 0), (100, 0), (100, 1), (100, 50), (100, 100)):
        metrics.session_ended(drafted, accepted)
    seen = exported(metrics.instruments)
    buckets = [
        seen.sum("outrider_request_acceptance_bucket", le=bound) for bound in ("0.0", "0.01", "0.5", "0.99", "1.0")
    ]
    assert buckets == [1, 2, 3, 3, 4]


def test_tenants_that_are_not_in_the_file_share_a_label() -> None:
    tenants = Tenants.model_validate({"tenants": {"known": {}}})
    assert [tenants.label(name) for name in ("known", "anybody", "")] == ["known", "other", "other"]


def test_every_service_has_a_part_of_the_list() -> None:
    assert {name for service in ("orchestrator", "draft", "target") for name in of(service)} == {
        instrument.name for instrument in CATALOGUE
    }
