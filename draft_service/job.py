"""One block in the making."""

from dataclasses import dataclass, field

from draft_service.commands import Ask, Key, SessionLaw
from draft_service.growth import Growth
from outrider.law.masking import Words
from outrider.law.noise import RoundNoise
from outrider.law.sparse import Float32Array, Int32Array
from outrider.lm.passes import Pass, Work
from outrider.lm.session_cache import Session
from outrider.net.errors import OutriderError
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer, Translation


@dataclass(eq=False)
class Job:
    """The newest command of a session, or work ahead of it. The engine thread makes it and finishes it; the event loop
    then reads it.

    Attributes:
        ask: the command, or the one that is expected.
        limit: tokens wanted: the lookahead, or what the context still holds.
        number: order of arrival.
        ahead: nobody waits for it: the command is only expected.
        guess: not a block but the one token that ends the round of `ask`, as the target may draw it.
        pushed: the peer has it.
        ahead_tokens: how many of the tokens were there when the command came.
        tokens: drawn so far.
        rows: the laws that they were drawn from, one (token_ids, probs) pair a token.
        runners_up: at temperature 0, where a law says nothing of it, (next best token, its probability over that of the
            best) for each token; empty where nobody asks.
        bonus: the guess of what follows the block, when there was one.
        mask: the tokens that the session's language allows next, where a model is asked; None without a language.
        work: the positions of the present step; None between steps.
        growth: the tree in the making, where one is wanted; None for a chain.
        parents: the row that each token follows; None in a chain.
        traced: the passes, where the command is traced.
        source: what makes it, where that is decided for each block; None before it is, and elsewhere.
        inner: the block in the draft model's own tokens, where it is drawn in these; None otherwise.
        place: where the next token stands, of an inner block, in the target's tokens; None elsewhere.
        translation: how the block comes from the draft model's own tokens; unspecified where it has the target's.
        done: the block is complete.
        failed: why there will be none.
    """

    ask: Ask
    law: SessionLaw
    session: Session[Key]
    limit: int
    number: int
    ahead: bool = False
    guess: bool = False
    pushed: bool = False
    ahead_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[Int32Array, Float32Array]] = field(default_factory=list)
    runners_up: list[tuple[int, float]] = field(default_factory=list)
    bonus: "Job | None" = None
    mask: Words | None = None
    work: Work | None = None
    growth: Growth | None = None
    parents: Int32Array | None = None
    traced: list[Pass] = field(default_factory=list)
    source: Proposer.ValueType | None = None
    inner: "Job | None" = None
    place: int | None = None
    translation: Translation.ValueType = draft_pb2.TRANSLATION_UNSPECIFIED
    done: bool = False
    failed: OutriderError | None = None
    first_pass_at: float | None = None
    forward_micros: int = 0
    passes: int = 0

    @property
    def made_by(self) -> Proposer.ValueType:
        """The proposer whose block it is."""
        return self.law.kind if self.source is None else self.source

    @property
    def noise(self) -> RoundNoise:
        """The noise of this round."""
        return RoundNoise(self.law.seed, self.ask.base_length)

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return self.session.length if self.place is None else self.place

    @property
    def ended(self) -> bool:
        """Whether its last token ends the output."""
        return bool(self.tokens) and self.tokens[-1] in self.law.params.stop_token_ids

    def allowed(self, tokens: Int32Array) -> Int32Array:
        """The leading tokens that the session's language allows after what it holds; all of them without one."""
        grammar = self.session.grammar
        return tokens if grammar is None else tokens[: grammar.legal(self.session.tokens, tokens)]

    def add(self, token: int, row: tuple[Int32Array, Float32Array]) -> None:
        """One more draft token; the block is done when it is long enough or the token ends the output."""
        self.tokens.append(token)
        self.rows.append(row)
        self.done = len(self.tokens) == self.limit or self.ended

    def asked(self, ask: Ask, limit: int) -> int:
        """Makes the work ahead that of a command that has come, for at most `limit` tokens.

        Returns how many tokens were cut off.
        """
        cut = max(0, len(self.tokens) - limit)
        del self.tokens[limit:], self.rows[limit:], self.runners_up[limit:]
        self.bonus = None if cut else self.bonus
        self.ask, self.limit, self.ahead, self.ahead_tokens = ask, limit, False, len(self.tokens)
        self.done = self.done or len(self.tokens) == limit
        return cut


@dataclass(frozen=True)
class Answer:
    """What the engine thread hands over for one command.

    Attributes:
        job: the finished block; None when there is an error, or when nothing is sent.
        error: why there is no block; None with a block, and when nothing is sent.
        ahead: the block answers no command: it is pushed.
        superseded: a newer command took the place of this one.
    """

    ask: Ask
    job: Job | None = None
    error: OutriderError | None = None
    ahead: bool = False
    superseded: bool = False

    @property
    def silent(self) -> bool:
        """Whether nothing is sent: a newer command of the session took its place, or the peer has the block."""
        return self.job is None and self.error is None
