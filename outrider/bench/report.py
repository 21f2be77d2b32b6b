"""What `outrider bench` writes: report.json. docs/benchmark.schema.json is made from these classes.

The version grows when a field goes or changes its meaning; new fields do not change it.
"""

from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Milliseconds = Annotated[float, Field(description="milliseconds")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Part):
    """One number for each repetition, summed up."""

    median: float
    low: float = Field(description="the least of the repetitions")
    high: float = Field(description="the greatest of the repetitions")


class Quantiles(_Part):
    """Over all requests of all repetitions, in milliseconds, by linear interpolation."""

    p50: Milliseconds
    p95: Milliseconds
    p99: Milliseconds


class RunReport(_Part):
    """One repetition."""

    seconds: float = Field(description="from the first request to the end of the last answer")
    requests: int
    tokens: int = Field(description="of all answers")
    tokens_per_second: float


class RoundTimes(_Part):
    """Where the wall time of a round goes, mean over all rounds. The parts up to `other` add up to `round`."""

    round: Milliseconds = Field(description="time of the requests over their rounds")
    draft_wait: Milliseconds = Field(description="waiting for the block, since it was asked for")
    verify_forward: Milliseconds = Field(description="passes of the target that held the session")
    verify_wait: Milliseconds = Field(description="the rest of verifying: queues, serialisation, the network")
    accept: Milliseconds = Field(description="from rows to outcome")
    other: Milliseconds = Field(description="everything else: starting the session, text, the stream to the client")
    commit: Milliseconds = Field(description="the write to the session store, while the next round runs")
    draft_forward: Milliseconds = Field(description="passes of the draft; part of draft_wait unless it drafts ahead")


class Speculation(_Part):
    """What blocks gave. The closed form assumes that every draft token is kept with the same probability `alpha`."""

    drafted: int = Field(description="draft tokens that were verified")
    accepted: int = Field(description="draft tokens that were kept")
    alpha: float | None = Field(description="accepted / (accepted + rejections); null without a decided token")
    kept_at: list[float] = Field(
        description="by position in the block: share of the blocks reaching it that were kept up to and with it"
    )
    drafted_at: list[int] = Field(description="by position: blocks that reached it")
    closed_form: float | None = Field(description="(1 - alpha^(K+1)) / (1 - alpha) tokens a round, K the lookahead")
    closed_form_as_drafted: float | None = Field(
        description="the same, with K as each round had it: shorter blocks, and 0 in rounds without one"
    )
    measured: float | None = Field(
        description="(accepted + 1) tokens a round, mean over the rounds; before stops cut any"
    )


class Rounds(_Part):
    """Counts of the rounds of all repetitions."""

    rounds: int
    target_passes: int
    tokens_per_pass: float | None
    bytes_per_token: float | None = Field(description="serialised bytes of the draft and verify messages")
    plain: dict[str, int] = Field(description="rounds without a block, by reason")
    times: RoundTimes | None = Field(description="null where the way tells no times")
    speculation: Speculation | None = Field(description="null without blocks")


class CellReport(_Part):
    """One way of answering one prompt set at one concurrency."""

    prompt_set: str
    concurrency: int = Field(description="requests under way at once")
    way: str = Field(description='"speculative", "plain", "loop", "transformers assisted", "openai URL", ...')
    proposer: str = Field(description="what made the blocks; empty when unknown, or without blocks")
    lookahead: int | None = Field(
        description="longest block; 0 without blocks, or when unknown; null: the orchestrator chose each round's"
    )
    runs: list[RunReport]
    tokens_per_second: Spread
    speed_up: Spread | None = Field(
        description="tokens/s over those of plain in the same repetition; null for plain itself"
    )
    time_to_first_token: Quantiles | None = Field(description="null when no answer had a token")
    inter_token: Quantiles | None = Field(
        description="of each request: time after the first token over the tokens after it; null without a second token"
    )
    message_gap: Quantiles | None = Field(description="between messages that brought tokens; null without two of them")
    end_to_end: Quantiles
    same_tokens: float | None = Field(
        description="share of the answers that equal plain's first to the same prompt; null where that is not promised"
    )
    rounds: Rounds | None = Field(description="null where the way tells nothing of rounds")


class NotMeasured(_Part):
    """A cell that was left out."""

    prompt_set: str
    concurrency: int
    way: str
    reason: str


class Machine(_Part):
    """Where it ran."""

    system: str
    processor: str
    cores: int = Field(description="that this process may use")
    load_before: float | None = Field(description="load average of the minute before; null where the system has none")
    python: str
    torch: str
    transformers: str


class Served(_Part):
    """What was measured."""

    outrider: str = Field(description="version of the orchestrator")
    address: str = Field(description="of the orchestrator; empty when it was started for this report")
    target: str
    drafts: list[str] = Field(description="models of the draft workers that are in use")
    dtype: str = Field(description="of the target")
    target_threads: int | None = Field(description="null when the system was running already")
    draft_threads: int | None = Field(description="null when the system was running already")


class Settings(_Part):
    """What was asked."""

    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int | None
    acceptance: str = Field(description="empty leaves it to the orchestrator: greedy at temperature 0, ...")
    repeats: int
    concurrencies: list[int]
    prompts: dict[str, int] = Field(description="prompts by set")


class Memory(_Part):
    """Peak of one process that was started for this report."""

    service: str
    peak_bytes: int = Field(description="largest resident set, model included")


class Report(_Part):
    """A whole report."""

    schema_version: int = SCHEMA_VERSION
    created: AwareDatetime
    machine: Machine
    served: Served
    settings: Settings
    cells: list[CellReport]
    not_measured: list[NotMeasured]
    memory: list[Memory] = Field(description="empty when the system was running already, or the kernel does not tell")
