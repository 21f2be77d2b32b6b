"""Every instrument of every service: names, labels and units. Services make their instruments from this list and no
others, docs/metrics.md is written from it, and dashboards, rules and autoscalers are tested against it.

Raw counters; ratios are the query's work. Every label has few values: never a session, a request or an address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from outrider.net.bounds import MAX_LOOKAHEAD
from outrider.v1 import draft_pb2, orchestrator_pb2, types_pb2

Kind = Literal["counter", "gauge", "histogram"]
Service = Literal["orchestrator", "draft", "target"]

ORCHESTRATOR: tuple[Service, ...] = ("orchestrator",)
DRAFT: tuple[Service, ...] = ("draft",)
TARGET: tuple[Service, ...] = ("target",)
EVERY: tuple[Service, ...] = ("orchestrator", "draft", "target")

# What PROCESS metrics there are beside ours: the Prometheus client's own, on Linux.
PROCESS_METRICS = (
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
)
# Attributes of the process's resource: service name, version and instance.
TARGET_INFO = "target_info"


@dataclass(frozen=True)
class Label:
    """One label; an empty value is none.

    Attributes:
        name: as an OpenTelemetry attribute; Prometheus has underscores for dots.
        values: all of them; empty where they cannot be listed.
        bound: why there are few where they are not listed.
    """

    name: str
    values: tuple[str, ...] = ()
    bound: str = ""

    @property
    def prometheus_name(self) -> str:
        """As Prometheus spells it."""
        return self.name.replace(".", "_")


@dataclass(frozen=True)
class Instrument:
    """One instrument.

    Attributes:
        name: as OpenTelemetry spells it.
        unit: in UCUM: "s", "By", "1", or a {noun}.
        meaning: one sentence, for people.
        services: which have it.
        labels: in the order in which values are given.
        bounds: of a histogram's buckets.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    services: tuple[Service, ...]
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Of its family: a counter's with `_total`; a histogram has `_bucket`, `_sum` and `_count` after it."""
        name = self.name.replace(".", "_")
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        name += unit if not name.endswith(unit) else ""
        return f"{name}_total" if self.kind == "counter" else name

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names of the series that a query may select."""
        name = self.prometheus_name
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if self.kind == "histogram" else (name,)


def names(values: Iterable[str], prefix: str) -> tuple[str, ...]:
    """Names of an enum's values as labels have them."""
    return tuple(value.removeprefix(prefix) for value in values)


# What a round without a reason for having no block is labelled with.
BLOCK = "BLOCK"
UNLISTED = "other"

_REASONS = names(orchestrator_pb2.PlainReason.keys(), "PLAIN_REASON_")[1:]
PLAIN_REASON = Label("reason", (BLOCK, *_REASONS))
DISABLED_REASON = Label("reason", _REASONS)
ACCEPTANCE = Label("acceptance", names(orchestrator_pb2.Acceptance.keys(), "ACCEPTANCE_")[1:])
ORIGIN = Label("origin", ("ACCEPTED", "RECOVERED", "BONUS", "PLAIN"))
POSITION = Label("position", bound=f"0 to {MAX_LOOKAHEAD - 1}")
ANSWER = Label("reason", ("OK", *names(types_pb2.ErrorReason.keys(), "ERROR_REASON_")[1:]))
DISCARD = Label(
    "reason",
    ("missed", "stale", "late", "malformed", "wrong_length", "token_outside_vocabulary", "audit", "grammar"),
)
TENANT = Label("tenant", bound=f'names in the file of --tenants; "{UNLISTED}" is everyone else')
POOL = Label("pool", ("target", "draft"))
WORKER_STATE = Label("state", ("ready", "failing", "unavailable"))
ENGINE_STATE = Label("state", ("loading", "serving", "stuck", "failed", "draining"))
STORE_CALLS = ("create", "commit", "finish", "load", "take_over", "request_cancel", "ping")
STORE_CALL = Label("operation", STORE_CALLS)
SOURCE = Label("source", ("request", "history", "none"))
# Not the orchestrator's choice, which is one of the others in the end.
PROPOSER = Label(
    "proposer", tuple(name.lower() for name in names(draft_pb2.Proposer.keys(), "PROPOSER_")[1:] if name != "AUTO")
)
OUTCOME = Label("outcome", ("ready", "begun", "missed"))

OPERATION = Label("gen_ai.operation.name", ("chat", "text_completion", "resume"))
PROVIDER = Label("gen_ai.provider.name", ("outrider",))
MODEL = Label("gen_ai.request.model", bound="the one that the orchestrator was started with")
CANCELLED = "CANCELLED"
ERROR = Label("error.type", ("", CANCELLED, *names(types_pb2.ErrorReason.keys(), "ERROR_REASON_")[1:]))
TOKEN_TYPE = Label("gen_ai.token.type", ("input", "output"))
_GEN_AI = (OPERATION, PROVIDER, MODEL)

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_ITEMS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_TENTHS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# Recommended by the conventions.
_TOKEN_BOUNDS = tuple(4.0**power for power in range(14))
_DURATION_BOUNDS = tuple(0.01 * 2**power for power in range(14))
_FIRST_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def _part(name: str, meaning: str) -> Instrument:
    return Instrument(
        f"outrider.round.{name}", "histogram", "s", f"Of each round: {meaning}", ORCHESTRATOR, (), _SECONDS
    )


def _counter(name: str, unit: str, meaning: str, *labels: Label) -> Instrument:
    return Instrument(f"outrider.{name}", "counter", unit, meaning, ORCHESTRATOR, labels)


def _gauge(name: str, unit: str, meaning: str, *labels: Label) -> Instrument:
    return Instrument(f"outrider.{name}", "gauge", unit, meaning, ORCHESTRATOR, labels)


_ROUNDS = (
    _counter("rounds", "{round}", f"Rounds, {BLOCK} or by why they had none", PLAIN_REASON),
    _counter("drafts", "{block}", "Blocks that were verified", ACCEPTANCE),
    _counter("draft_tokens", "{token}", "Draft tokens that were verified", ACCEPTANCE),
    _counter("accepted_tokens", "{token}", "Draft tokens that were kept", ACCEPTANCE),
    _counter(
        "draft_tokens_by_position", "{token}", "Draft tokens that were verified, by position in the block", POSITION
    ),
    _counter(
        "accepted_tokens_by_position", "{token}", "Draft tokens that were kept, by position in the block", POSITION
    ),
    _counter("emitted_tokens", "{token}", "Committed tokens, by where they come from", ORIGIN),
    _counter("trimmed_tokens", "{token}", "Tokens of a round after the one that ended its generation"),
    _counter(
        "drafted_ahead_tokens",
        "{token}",
        "Draft tokens verified that were drawn before they were asked for",
        ACCEPTANCE,
    ),
    _counter("blocks_ready", "{block}", "Blocks that were there before their round, which did not wait", ACCEPTANCE),
    _counter("wire_bytes", "By", "Serialised bytes of draft and verify messages, both directions", ACCEPTANCE),
    _counter("draft_discarded", "{block}", "Blocks that came and were not verified", DISCARD),
    _counter(
        "draft_calls",
        "{call}",
        "Commands to draft workers, by lookahead and by kind",
        Label("kind", ("block", "probe", "prefix")),
        Label("lookahead", bound=f"0 to {MAX_LOOKAHEAD}"),
    ),
    _counter(
        "proposer_choices",
        "{choice}",
        "Proposers chosen for sessions whose requests name none: the only one, by what was measured, or as a trial",
        PROPOSER,
        Label("reason", ("only", "measured", "trial")),
    ),
    _counter("proposer_blocks", "{block}", "Blocks that were verified, by what made them", PROPOSER),
    _counter("proposer_draft_tokens", "{token}", "Draft tokens that were verified, by what made them", PROPOSER),
    _counter("proposer_accepted_tokens", "{token}", "Draft tokens that were kept, by what made them", PROPOSER),
    _counter(
        "draft_hedges",
        "{block}",
        "Late blocks asked for at a second worker, by whether it won",
        Label("won", ("True", "False")),
    ),
    _counter("speculation_disabled", "{session}", "Sessions that lost speculation for good", DISABLED_REASON),
    _counter("prefix_resent", "{prefix}", "Whole prefixes sent again"),
    _counter("sessions_resumed", "{session}", "Sessions taken over by a Resume"),
    Instrument(
        "outrider.lookahead", "histogram", "{token}", "Length of each round's block", ORCHESTRATOR, (), _LENGTHS
    ),
    _part("draft_wait", "waiting for the block: what a faster or larger draft pool would save"),
    _part("draft_forward", "the draft's passes for the block; mostly before the round"),
    _part("verify", "from the item to its rows: the round trip, queues and passes included"),
    _part("batch_wait", "waiting in the orchestrator for the next call to leave; part of verify"),
    _part("verify_queue", "waiting for the target's pass, the batch wait included; part of verify"),
    _part("target_forward", "the target's passes; part of verify"),
    _part("accept", "acceptance, the wait for others of the same turn included"),
    _part("commit", "the store's write, as the round waited for it"),
)

_REQUESTS = (
    Instrument(
        "gen_ai.server.request.duration",
        "histogram",
        "s",
        "Requests, from their arrival to their last message",
        ORCHESTRATOR,
        (*_GEN_AI, ERROR),
        _DURATION_BOUNDS,
    ),
    Instrument(
        "gen_ai.server.time_to_first_token",
        "histogram",
        "s",
        "From a request's arrival to its first token",
        ORCHESTRATOR,
        _GEN_AI,
        _FIRST_BOUNDS,
    ),
    Instrument(
        "gen_ai.server.time_per_output_token",
        "histogram",
        "s",
        "Of each generation that ended well: seconds for every token after the first",
        ORCHESTRATOR,
        _GEN_AI,
        _PER_TOKEN_BOUNDS,
    ),
    Instrument(
        "gen_ai.client.token.usage",
        "histogram",
        "{token}",
        "Tokens of each generation's prompt (input) and output",
        ORCHESTRATOR,
        (*_GEN_AI, TOKEN_TYPE),
        _TOKEN_BOUNDS,
    ),
    Instrument(
        "outrider.request.acceptance",
        "histogram",
        "1",
        "Accepted part of each generation's draft tokens, of those with 16 or more: very low or very high is an early "
        "sign of a broken draft or of output that repeats itself",
        ORCHESTRATOR,
        (),
        (0.0, 0.01, *_TENTHS, 1.0),
    ),
    _counter("requests_refused", "{request}", "Requests that there was no room for, or not in time", TENANT),
    _counter("tenant_tokens", "{token}", "Generated tokens by whom they were for, counted when a request ends", TENANT),
)

_ORCHESTRATOR_STATE = (
    _gauge("running_sessions", "{session}", "Generations that run"),
    _gauge("running_tokens", "{token}", "Tokens of the prompts and outputs (max_tokens) of what runs"),
    _gauge("waiting_requests", "{request}", "Requests that wait to be let in"),
    _gauge("awaited_blocks", "{block}", "Commands to draft workers that are not answered"),
    _gauge("verify_queue", "{item}", "Items that wait for the next call to a target to leave"),
    _gauge("verify_in_flight", "{item}", "Items in calls that targets have not answered"),
    _gauge(
        "workers",
        "{worker}",
        "Workers known: ready, failing (its breaker is open: tried now and then) or unavailable",
        POOL,
        WORKER_STATE,
    ),
    Instrument(
        "outrider.store.duration",
        "histogram",
        "s",
        "Calls of the session store, repeats included",
        ORCHESTRATOR,
        (STORE_CALL,),
        _SECONDS,
    ),
    _counter("store.errors", "{call}", "Calls of the session store that did not get through", STORE_CALL),
    _gauge(
        "store.fullness", "1", "Part of the store's memory that is taken; absent without a limit or the right to ask"
    ),
)


def _worker(
    name: str, kind: Kind, unit: str, meaning: str, *labels: Label, **bounds: tuple[float, ...]
) -> list[Instrument]:
    """The same of both workers, under a name of its own in each."""
    return [
        Instrument(f"outrider.{service}.{name}", kind, unit, meaning, (service,), labels, **bounds)
        for service in (*TARGET, *DRAFT)
    ]


_WORKERS = (
    *_worker("state", "gauge", "1", "1 for the state that the worker is in, 0 for the others", ENGINE_STATE),
    *_worker("turn_age", "gauge", "s", "For how long the engine has been in its present turn: grows when it is stuck"),
    *_worker("sessions", "gauge", "{session}", "Sessions with state"),
    *_worker("queue", "gauge", "{item}", "Items that were taken in and are not answered"),
    *_worker("queue_time", "histogram", "s", "Of each item: from its arrival to its first pass", bounds=_SECONDS),
    *_worker("answers", "counter", "{item}", "Items answered: OK or the error's reason", ANSWER),
    *_worker("non_finite_logits", "counter", "{item}", "Items that NaN or infinite logits ended"),
    *_worker("passes", "counter", "{pass}", "Forward passes"),
    *_worker("positions", "counter", "{position}", "Positions computed in passes"),
    *_worker("pass_time", "histogram", "s", "Of each pass: how long it took", bounds=_SECONDS),
    *_worker("pass_items", "histogram", "{item}", "Of each pass: sessions that shared it", bounds=_ITEMS),
    *_worker(
        "pass_fullness",
        "histogram",
        "1",
        "Of each pass: its positions as part of the token budget",
        bounds=(0.01, *_TENTHS, 1.0),
    ),
    *_worker("token_budget", "gauge", "{position}", "Most positions of a pass"),
    *_worker("kv_pages_used", "gauge", "{page}", "Pages of the KV cache that sessions hold"),
    *_worker("kv_pages_shared", "gauge", "{page}", "Those of them that more than one session holds"),
    *_worker("kv_pages_total", "gauge", "{page}", "Pages of the KV cache; 0 without one"),
    *_worker("prefix_tokens", "counter", "{token}", "Tokens of sequences when their state was opened"),
    *_worker("prefix_hit_tokens", "counter", "{token}", "Those of them whose state other sessions had left"),
    *_worker("evictions", "counter", "{session}", "Sessions freed for age or for want of KV pages"),
)

_DRAFT_COUNTERS = tuple(
    Instrument(f"outrider.draft.{name}", "counter", unit, meaning, DRAFT, labels)
    for name, unit, meaning, labels in (
        ("shipped_blocks", "{block}", "Blocks shipped", (PROPOSER,)),
        ("shipped_tokens", "{token}", "Draft tokens shipped", (PROPOSER,)),
        ("ahead_tokens", "{token}", "Draft tokens drawn before a command asked for them", ()),
        ("ahead_wasted_tokens", "{token}", "Those of them that no command asked for", ()),
        ("ahead_outcomes", "{command}", "Commands after work ahead, by what it was for them", (OUTCOME,)),
        ("superseded", "{command}", "Commands given up for a newer one, a Close or a lost stream", ()),
        ("suffix_blocks", "{block}", "Blocks asked of the suffix proposer, by what it found one in", (SOURCE,)),
    )
)
_DRAFT = (
    *_DRAFT_COUNTERS,
    Instrument(
        "outrider.draft.indexed_tokens", "gauge", "{token}", "Tokens of sessions that suffix has indexed", DRAFT
    ),
    Instrument(
        "outrider.draft.history_tokens", "gauge", "{token}", "Tokens of earlier outputs kept, all tenants'", DRAFT
    ),
)

_LOOP = (
    Instrument(
        "outrider.event_loop.lag",
        "histogram",
        "s",
        "How late the event loop was, looked at four times a second",
        EVERY,
        (),
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    ),
    Instrument("outrider.event_loop.stalled", "gauge", "s", "By how much the event loop is late at this moment", EVERY),
)

CATALOGUE: tuple[Instrument, ...] = (*_ROUNDS, *_REQUESTS, *_ORCHESTRATOR_STATE, *_WORKERS, *_DRAFT, *_LOOP)


def of(service: Service) -> dict[str, Instrument]:
    """The instruments of a service, by name."""
    return {instrument.name: instrument for instrument in CATALOGUE if service in instrument.services}


def series(service: Service | None = None) -> frozenset[str]:
    """Every name that a query may select, of one service or of all, those of the process included."""
    listed = [each for each in CATALOGUE if service is None or service in each.services]
    return frozenset(name for each in listed for name in each.series_names) | {*PROCESS_METRICS, TARGET_INFO}
