"""Raw counters of the orchestrator as OpenTelemetry instruments; ratios are the query's work.

Acceptance rate = accepted_tokens / draft_tokens; mean tokens per round = emitted_tokens / rounds.
"""

from opentelemetry import metrics

from orchestrator.stats import RoundStats
from outrider.v1.orchestrator_pb2 import Acceptance, PlainReason


class Metrics:
    """One per orchestrator; without a configured exporter every call is nearly free."""

    def __init__(self, provider: metrics.MeterProvider | None = None) -> None:
        meter = metrics.get_meter("outrider.orchestrator", meter_provider=provider)
        self._rounds = meter.create_counter("outrider.rounds", "{round}", "Rounds, by reason when without a block")
        self._drafted = meter.create_counter("outrider.draft_tokens", "{token}", "Draft tokens that were verified")
        self._ahead = meter.create_counter(
            "outrider.drafted_ahead_tokens",
            "{token}",
            "Draft tokens verified that were drawn before they were asked for",
        )
        self._ready = meter.create_counter(
            "outrider.blocks_ready", "{block}", "Blocks that were there before their round, which did not wait"
        )
        self._accepted = meter.create_counter("outrider.accepted_tokens", "{token}", "Draft tokens that were kept")
        self._by_position = meter.create_counter(
            "outrider.accepted_tokens_by_position", "{token}", "Draft tokens that were kept, by position in the block"
        )
        self._wire = meter.create_counter(
            "outrider.wire_bytes", "By", "Serialised bytes of draft and verify messages, both directions"
        )
        self._emitted = meter.create_counter("outrider.emitted_tokens", "{token}", "Committed tokens")
        self._discarded = meter.create_counter(
            "outrider.draft_discarded", "{block}", "Blocks that came and were not verified, by reason"
        )
        self._disabled = meter.create_counter(
            "outrider.speculation_disabled", "{session}", "Sessions that lost speculation for good, by reason"
        )
        self._asked = meter.create_counter(
            "outrider.draft_calls",
            "{call}",
            "Commands to draft workers, by lookahead and by kind: block, probe, or prefix to cache",
        )
        self._hedged = meter.create_counter(
            "outrider.draft_hedges",
            "{block}",
            "Late blocks asked for at a second worker, by whether it won",
        )
        self._resent = meter.create_counter("outrider.prefix_resent", "{prefix}", "Whole prefixes sent again")
        self._resumed = meter.create_counter(
            "outrider.sessions_resumed", "{session}", "Sessions taken over by a Resume"
        )

        self._refused = meter.create_counter(
            "outrider.requests_refused", "{request}", "Requests that there was no room for, or not in time"
        )

    def round(self, stats: RoundStats, emitted: int, acceptance: "Acceptance.ValueType") -> None:
        """One round, committed."""
        rule = {"acceptance": Acceptance.Name(acceptance)}
        self._rounds.add(1, {"reason": PlainReason.Name(stats.plain_reason)})
        self._drafted.add(stats.drafted, rule)
        self._accepted.add(stats.accepted, rule)
        self._ahead.add(stats.drafted_ahead, rule)
        self._ready.add(int(stats.block_ready), rule)
        self._wire.add(stats.wire_bytes, rule)
        for position in range(stats.accepted):
            self._by_position.add(1, {"position": position})
        self._emitted.add(emitted)

    def discarded(self, reason: str) -> None:
        """A block that came and was not verified: missed (pushed for other tokens than were committed), stale, late,
        malformed, wrong_length or audit."""
        self._discarded.add(1, {"reason": reason})

    def asked(self, lookahead: int, *, probe: bool) -> None:
        """A draft worker was asked for a block, or, at lookahead 0, to cache a prefix."""
        kind = "prefix" if not lookahead else "probe" if probe else "block"
        self._asked.add(1, {"kind": kind, "lookahead": lookahead})

    def hedged(self, *, won: bool) -> None:
        """A second draft worker was asked for a block, and its answer was used or not."""
        self._hedged.add(1, {"won": won})

    def speculation_disabled(self, reason: str) -> None:
        """A session goes on without blocks."""
        self._disabled.add(1, {"reason": reason})

    def resumed(self) -> None:
        """A session has this orchestrator for its new owner."""
        self._resumed.add(1)

    def refused(self) -> None:
        """There was no room for a request."""
        self._refused.add(1)

    def prefix_resent(self) -> None:
        """A worker had lost a session."""
        self._resent.add(1)
