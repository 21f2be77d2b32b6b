"""Instruments: raw counters and histograms; ratios are the query's work.

An exporter is whatever MeterProvider the process sets; without one the instruments do nothing.
"""

from opentelemetry import metrics

_meter = metrics.get_meter("outrider")

# target service

target_results = _meter.create_counter(
    "outrider.target.results", "{item}", "Items answered; attribute `reason`: OK or the reason of the error."
)
target_non_finite = _meter.create_counter(
    "outrider.target.non_finite_logits", "{item}", "Items whose logits held NaN, +inf or no finite value."
)
target_passes = _meter.create_counter("outrider.target.passes", "{pass}", "Forward passes.")
target_positions = _meter.create_counter("outrider.target.positions", "{position}", "Positions computed in passes.")
target_evictions = _meter.create_counter(
    "outrider.target.evictions", "{session}", "Sessions freed by the time-to-live or for want of KV pages."
)

# draft service

draft_results = _meter.create_counter(
    "outrider.draft.results", "{command}", "Commands answered; attribute `reason`: OK or the reason of the error."
)
draft_non_finite = _meter.create_counter(
    "outrider.draft.non_finite_logits", "{block}", "Blocks whose logits held NaN, +inf or no finite value."
)
draft_tokens = _meter.create_counter("outrider.draft.tokens", "{token}", "Draft tokens shipped; attribute `proposer`.")
draft_superseded = _meter.create_counter(
    "outrider.draft.superseded", "{command}", "Commands that a newer one of their session overtook."
)
draft_passes = _meter.create_counter("outrider.draft.passes", "{pass}", "Forward passes.")
draft_positions = _meter.create_counter("outrider.draft.positions", "{position}", "Positions computed in passes.")
draft_evictions = _meter.create_counter(
    "outrider.draft.evictions", "{session}", "Sessions freed by the time-to-live or for want of KV pages."
)
