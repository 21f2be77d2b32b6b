"""What the demo's runs gave, and what is said about them."""

from dataclasses import dataclass, field

from outrider.cli.client import Generation
from outrider.cli.demo_prompts import DemoPrompt
from outrider.cli.report import Comparison, counted
from outrider.cli.stats import total
from outrider.cli.system import SystemOptions

_ROUNDING = (
    "In {dtype} a pass over one position rounds otherwise than a pass over several, and near a tie another token wins: "
    "with --dtype float32 the tokens are the same."
)


@dataclass(frozen=True)
class Plan:
    """How much the demo runs.

    Attributes:
        tokens: most tokens of each generation.
        lookahead: longest block; None lets the orchestrator choose each round's.
        runs: of each prompt, each way.
    """

    tokens: int
    lookahead: int | None
    runs: int


@dataclass
class DemoRuns:
    """One prompt, speculative and plain, run by run."""

    prompt: DemoPrompt
    lookahead: int | None
    speculative: list[Generation] = field(default_factory=list)
    plain: list[Generation] = field(default_factory=list)

    def way(self, lookahead: int | None) -> str:
        """The draft and the block length, or "plain"."""
        if lookahead is None:
            return self.prompt.proposer.value
        return f"{self.prompt.proposer.value} with lookahead {lookahead}" if lookahead else "plain"

    def comparison(self) -> Comparison:
        """The sums of both ways."""
        speculative, plain = (total(each.stats for each in side) for side in (self.speculative, self.plain))
        return Comparison(self.prompt.kind, speculative, plain, self.prompt.proposer.value, self.lookahead)

    def difference(self) -> int | None:
        """The first index at which any two runs differ; None when all gave the same tokens."""
        first = self.plain[0].tokens
        others = (other.tokens for other in (*self.plain, *self.speculative))
        return min((first_difference(first, other) for other in others if other != first), default=None)

    def verdict(self) -> str:
        """Whether all runs gave the same tokens, and where the first difference is when not."""
        index = self.difference()
        return f"{self.prompt.kind} " + ("identical" if index is None else f"differs from token {index + 1} on")


def first_difference(ours: list[int], theirs: list[int]) -> int:
    """Index of the first token that differs; the shorter length when one is the other's beginning."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def caption(kinds: list[DemoRuns], plan: Plan, options: SystemOptions) -> str:
    """How the numbers of the table came about, and whether both ways said the same."""
    target, draft = options.target_threads, options.draft_threads
    each = "for each model" if target == draft else f"for the target, {draft} for the draft"
    order = "in one run" if plan.runs == 1 else f"{plan.runs} times each way, in alternating order"
    texts = ", ".join(runs.verdict() for runs in kinds)
    differs = any(runs.difference() is not None for runs in kinds) and options.dtype != "float32"
    rounding = f" {_ROUNDING.format(dtype=options.dtype)}" if differs else ""
    return (
        f"{options.dtype}, {counted(target, 'thread')} {each}, at most {plan.tokens} tokens, {order}, after a warm-up "
        f"that cached the prompt. Tokens of both ways: {texts}.{rounding}"
    )
