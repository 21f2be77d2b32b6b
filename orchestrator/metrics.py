"""What the orchestrator counts; ratios are the query's work. The catalogue says what each instrument means.

A round costs some microseconds here: nothing is allocated for it, and nothing is written out.
"""

from opentelemetry.metrics import MeterProvider

from orchestrator.stats import RoundStats
from outrider.observe.catalogue import BLOCK, UNLISTED, names
from outrider.observe.instruments import Instruments
from outrider.v1.draft_pb2 import Proposer
from outrider.v1.orchestrator_pb2 import Acceptance, PlainReason, TokenOrigin

_RULES = dict(zip(Acceptance.values(), names(Acceptance.keys(), "ACCEPTANCE_"), strict=True))
_REASONS = dict(zip(PlainReason.values(), names(PlainReason.keys(), "PLAIN_REASON_"), strict=True))
_REASONS[PlainReason.Value("PLAIN_REASON_UNSPECIFIED")] = BLOCK
_ORIGINS = dict(zip(TokenOrigin.values(), names(TokenOrigin.keys(), "TOKEN_ORIGIN_"), strict=True))
_PROPOSERS = dict(zip(Proposer.values(), (name.lower() for name in names(Proposer.keys(), "PROPOSER_")), strict=True))
_ACCEPTED = "ACCEPTED"
_PROVIDER = "outrider"
# Of fewer draft tokens the accepted part is chance.
_FEWEST_DRAFT_TOKENS = 16


class Metrics:
    """One per orchestrator, used by its event loop alone.

    Args:
        provider: where the numbers go; None: nowhere.
        model: what requests are for.

    Attributes:
        instruments: to be exported.
    """

    def __init__(self, provider: MeterProvider | None = None, model: str = "") -> None:
        self.instruments = Instruments("orchestrator", provider)
        self._model = model
        counter, histogram = self.instruments.counter, self.instruments.histogram
        self._rounds = counter("outrider.rounds")
        self._drafts = counter("outrider.drafts")
        self._drafted = counter("outrider.draft_tokens")
        self._accepted = counter("outrider.accepted_tokens")
        self._drafted_at = self.instruments.position_counter("outrider.draft_tokens_by_position")
        self._accepted_at = self.instruments.position_counter("outrider.accepted_tokens_by_position")
        self._emitted = counter("outrider.emitted_tokens")
        self._trimmed = counter("outrider.trimmed_tokens")
        self._ahead = counter("outrider.drafted_ahead_tokens")
        self._ready = counter("outrider.blocks_ready")
        self._wire = counter("outrider.wire_bytes")
        self._discarded = counter("outrider.draft_discarded")
        self._disabled = counter("outrider.speculation_disabled")
        self._asked = counter("outrider.draft_calls")
        self._hedged = counter("outrider.draft_hedges")
        self._choices = counter("outrider.proposer_choices")
        self._proposed = counter("outrider.proposer_blocks")
        self._proposed_tokens = counter("outrider.proposer_draft_tokens")
        self._proposed_accepted = counter("outrider.proposer_accepted_tokens")
        self._resent = counter("outrider.prefix_resent")
        self._resumed = counter("outrider.sessions_resumed")
        self._refused = counter("outrider.requests_refused")
        self._tenant_tokens = counter("outrider.tenant_tokens")
        self._store_errors = counter("outrider.store.errors")
        self._store = histogram("outrider.store.duration")
        self._lookahead = histogram("outrider.lookahead")
        self._draft_wait = histogram("outrider.round.draft_wait")
        self._draft_forward = histogram("outrider.round.draft_forward")
        self._verify = histogram("outrider.round.verify")
        self._batch_wait = histogram("outrider.round.batch_wait")
        self._verify_queue = histogram("outrider.round.verify_queue")
        self._target_forward = histogram("outrider.round.target_forward")
        self._accept = histogram("outrider.round.accept")
        self._commit = histogram("outrider.round.commit")
        self._acceptance = histogram("outrider.request.acceptance")
        self._duration = histogram("gen_ai.server.request.duration")
        self._first_token = histogram("gen_ai.server.time_to_first_token")
        self._per_token = histogram("gen_ai.server.time_per_output_token")
        self._usage = histogram("gen_ai.client.token.usage")
        for counter_of_tenants in (self._refused, self._tenant_tokens):
            counter_of_tenants.add(0, UNLISTED)

    def round(
        self,
        stats: RoundStats,
        emitted: int,
        acceptance: "Acceptance.ValueType",
        origin: "TokenOrigin.ValueType",
    ) -> None:
        """One round, committed.

        Args:
            emitted: of its tokens; fewer than there were where one of them ended the generation.
            origin: of the last token of the round.
        """
        rule, drafted, accepted = _RULES[acceptance], stats.drafted, stats.accepted
        self._rounds.add(1, _REASONS[stats.plain_reason])
        if drafted:
            self._drafts.add(1, rule)
            self._drafted.add(drafted, rule)
            self._accepted.add(accepted, rule)
            self._ahead.add(stats.drafted_ahead, rule)
            self._ready.add(stats.block_ready, rule)
            if stats.proposer:
                self._by_proposer(_PROPOSERS[stats.proposer], drafted, accepted)
            self._drafted_at.add(stats.longest_path)
            self._accepted_at.add(accepted)
        self._wire.add(stats.wire_bytes, rule)
        self._emitted.add(min(emitted, accepted), _ACCEPTED)
        self._emitted.add(emitted > accepted, _ORIGINS[origin])
        self._trimmed.add(accepted + 1 - emitted)
        self._parts(stats)

    def _by_proposer(self, proposer: str, drafted: int, accepted: int) -> None:
        self._proposed.add(1, proposer)
        self._proposed_tokens.add(drafted, proposer)
        self._proposed_accepted.add(accepted, proposer)

    def _parts(self, stats: RoundStats) -> None:
        self._lookahead.record(stats.drafted)
        self._draft_wait.record(stats.draft_wait_micros * 1e-6)
        self._draft_forward.record(stats.draft_forward_micros * 1e-6)
        self._verify.record(stats.verify_micros * 1e-6)
        self._verify_queue.record(stats.verify_queue_micros * 1e-6)
        self._target_forward.record(stats.verify_forward_micros * 1e-6)
        self._accept.record(stats.accept_micros * 1e-6)
        self._commit.record(stats.commit_micros * 1e-6)

    def batched(self, seconds: float) -> None:
        """An item's wait for the call that it left in."""
        self._batch_wait.record(seconds)

    def discarded(self, reason: str) -> None:
        """A block that came and was not verified: missed (pushed for other tokens than were committed), stale, late,
        malformed, wrong_length, token_outside_vocabulary, audit or grammar."""
        self._discarded.add(1, reason)

    def asked(self, lookahead: int, *, probe: bool) -> None:
        """A draft worker was asked for a block, or, at lookahead 0, to cache a prefix."""
        self._asked.add(1, "prefix" if not lookahead else "probe" if probe else "block", lookahead)

    def proposer_chosen(self, proposer: "Proposer.ValueType", reason: str) -> None:
        """A session whose request names no proposer has chosen one: the only one, by measurement, or as a trial."""
        self._choices.add(1, _PROPOSERS[proposer], reason)

    def hedged(self, *, won: bool) -> None:
        """A second draft worker was asked for a block, and its answer was used or not."""
        self._hedged.add(1, str(won))

    def speculation_disabled(self, reason: "PlainReason.ValueType") -> None:
        """A session goes on without blocks."""
        self._disabled.add(1, _REASONS[reason])

    def resumed(self) -> None:
        """A session has this orchestrator for its new owner."""
        self._resumed.add(1)

    def prefix_resent(self) -> None:
        """A worker had lost a session."""
        self._resent.add(1)

    def refused(self, tenant: str) -> None:
        """There was no room for a request. Tenants are those of the settings: others share one name."""
        self._refused.add(1, tenant)

    def served(self, tenant: str, tokens: int) -> None:
        """A request has ended that so many tokens were generated for."""
        self._tenant_tokens.add(tokens, tenant)

    def session_ended(self, drafted: int, accepted: int) -> None:
        """A session has ended that so many draft tokens were verified for."""
        if drafted >= _FEWEST_DRAFT_TOKENS:
            self._acceptance.record(accepted / drafted)

    def stored(self, operation: str, seconds: float, *, failed: bool) -> None:
        """A call of the store came to its end."""
        self._store.record(seconds, operation)
        self._store_errors.add(failed, operation)

    def first_token(self, operation: str, seconds: float) -> None:
        """A request's first token, so long after its arrival."""
        self._first_token.record(seconds, operation, _PROVIDER, self._model)

    def generated(self, operation: str, prompt: int, tokens: int, per_token: float | None) -> None:
        """A generation came to its end; `per_token` in seconds, where more than one token was generated."""
        self._usage.record(prompt, operation, _PROVIDER, self._model, "input")
        self._usage.record(tokens, operation, _PROVIDER, self._model, "output")
        if per_token is not None:
            self._per_token.record(per_token, operation, _PROVIDER, self._model)

    def request_ended(self, operation: str, seconds: float, error: str) -> None:
        """A request has ended; `error` is empty where it ended well."""
        self._duration.record(seconds, operation, _PROVIDER, self._model, error)
