"""Acceptance: pure functions of a block, its rows and the noise, of one block or of many at once.

Words: an *accepted* token is a draft token that was kept; a *recovered* token is drawn from the residual law after the
first rejection; a *bonus* token is drawn after a block accepted whole; *plain* is the token of a round without a block.
`target_probs` is the target's law, `draft_probs` the law that the draft token was drawn from.
"""

from collections.abc import Sequence

import numpy as np

from orchestrator.acceptance.block import block
from orchestrator.acceptance.branching import branching
from orchestrator.acceptance.coupled import coupled
from orchestrator.acceptance.greedy import greedy
from orchestrator.acceptance.laws import Block, side_by_side
from orchestrator.acceptance.outcome import Outcome
from orchestrator.acceptance.plain import plain
from orchestrator.acceptance.ratio import ratio
from outrider.law.batch import each_or_why
from outrider.law.noise import BatchNoise, RoundNoise
from outrider.law.rows import SupportRows
from outrider.law.sparse import Int32Array, SparseLaw
from outrider.law.tree import Tree
from outrider.v1.orchestrator_pb2 import Acceptance

__all__ = ["BY_LAW", "Block", "Outcome", "accept", "accept_each", "block", "branching", "coupled", "greedy", "ratio"]

# The rules that look at laws, and those that compare tokens.
BY_LAW = {Acceptance.ACCEPTANCE_RATIO: ratio, Acceptance.ACCEPTANCE_BLOCK: block}
_BY_TOKEN = {Acceptance.ACCEPTANCE_GREEDY: greedy, Acceptance.ACCEPTANCE_COUPLED: coupled}


def accept(
    rule: "Acceptance.ValueType",
    draft_tokens: Int32Array,
    draft_law: SparseLaw,
    rows: SupportRows | Int32Array,
    noise: RoundNoise,
    tree: Tree | None = None,
) -> Outcome:
    """Decides a round by the rule. A tree under `block`, which knows chains alone, is judged by `ratio`.

    Args:
        rule: any but UNSPECIFIED.
        draft_tokens: [lookahead]; token i stands at position noise.base_length + i.
        draft_law: [lookahead] rows, see Block; `greedy` and `coupled` do not look at it.
        rows: of the target: SupportRows over the support of draft_law for `ratio` and `block`, the target's own
            tokens, int32 [lookahead + 1], for `greedy` and `coupled`.
        noise: of the round.
        tree: the block's shape; None for a chain.

    Raises ValueError for a rule that is none, rows of another rule, and what the rule itself refuses.
    """
    if rule in BY_LAW and isinstance(rows, SupportRows):
        drawn = plain(draft_tokens, draft_law, rows)
        if drawn is not None:
            return drawn
        (outcome,) = accept_each(rule, [Block(draft_tokens, draft_law, rows, noise, tree)])
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome
    if rule in _BY_TOKEN and isinstance(rows, np.ndarray):
        return _BY_TOKEN[rule](draft_tokens, rows, tree)
    if rule in BY_LAW or rule in _BY_TOKEN:
        raise ValueError(f"{Acceptance.Name(rule)} does not judge rows of type {type(rows).__name__}")
    raise ValueError(f"{rule} is no acceptance rule")


def accept_each(rule: "Acceptance.ValueType", blocks: Sequence[Block]) -> list[Outcome | ValueError]:
    """`accept` of many blocks in one call, by `ratio` or `block`: what it returns or raises for each, bit for bit."""

    def decide(some: Sequence[Block]) -> list[Outcome]:
        return BY_LAW[rule](side_by_side(some), BatchNoise.of([block.noise for block in some]))

    chains = iter(each_or_why([block for block in blocks if block.tree is None], decide))
    return [_branching(block) if block.tree is not None else _or_error(next(chains)) for block in blocks]


def _branching(block: Block) -> Outcome | ValueError:
    assert block.tree is not None
    try:
        return branching(block, block.tree)
    except ValueError as error:
        return error


def _or_error(outcome: Outcome | str) -> Outcome | ValueError:
    return ValueError(outcome) if isinstance(outcome, str) else outcome
