"""A draft worker's block as it came off the wire, of which nothing is believed."""

from dataclasses import dataclass

from orchestrator.proposal import NO_LAW
from orchestrator.request import GenerationPlan
from outrider.law.sparse import Int32Array, SparseLaw
from outrider.law.tree import Tree
from outrider.lm.grammars import SessionGrammar
from outrider.net.arrays import ArrayError, int32s, law_from_message
from outrider.net.bounds import DEFAULT_LAW_TOP, MAX_LOOKAHEAD
from outrider.v1 import draft_pb2


class Unusable(Exception):
    """A block that cannot be used.

    Attributes:
        label: what is wrong, as the metric of discarded blocks says it.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self.label = label


@dataclass(frozen=True)
class Bounds:
    """How large a block may be.

    Attributes:
        lookahead: tokens of a path.
        nodes: tokens of a tree; 0 where none was asked for.
        pushed: whether the worker made it before it was asked to.
        vocab_size: of its tokens.
    """

    lookahead: int
    nodes: int
    pushed: bool
    vocab_size: int

    def exceeded_by(self, count: int, tree: Tree | None) -> bool:
        """Whether a block of so many tokens is more than was asked for."""
        if tree is None:
            return count > (MAX_LOOKAHEAD if self.pushed else self.lookahead)
        return self.pushed or len(tree.parents) != count or count > self.nodes or tree.depth > self.lookahead


def read_block(
    block: draft_pb2.Block, plan: GenerationPlan, bounds: Bounds
) -> tuple[Int32Array, SparseLaw, Tree | None]:
    """Tokens, the laws that they are said to be from, and the shape. Raises Unusable."""
    try:
        tokens = int32s(block.tokens, "block.tokens")
        tree = _shape(block)
        if bounds.exceeded_by(len(tokens), tree):
            raise Unusable("wrong_length")
        top = plan.law_top or DEFAULT_LAW_TOP
        law = NO_LAW if plan.judged_by_token else law_from_message(block.law, len(tokens), top, tree=tree is not None)
    except ArrayError as error:
        raise Unusable("malformed") from error
    # A negative id is a large one: a single comparison sees both.
    if len(tokens) and tokens.view("<u4").max() >= bounds.vocab_size:
        raise Unusable("token_outside_vocabulary")
    return tokens, law, tree


def legal(grammar: SessionGrammar, committed: Int32Array, tokens: Int32Array, tree: Tree | None) -> bool:
    """Whether a session's language allows the whole block after what is committed."""
    paths = [tokens] if tree is None else [tokens[list(tree.path(leaf))] for leaf in tree.leaves()]
    return all(grammar.legal(committed, path) == len(path) for path in paths)


def _shape(block: draft_pb2.Block) -> Tree | None:
    """Raises ArrayError where the parents are no tree."""
    if not block.parents:
        return None
    parents = int32s(block.parents, "block.parents")
    try:
        return Tree.of(parents)
    except ValueError as error:
        raise ArrayError(str(error)) from error
