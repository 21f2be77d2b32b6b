"""What a draft proposes for a round."""

from dataclasses import dataclass
from typing import TypeAlias

from outrider.law.sparse import Int32Array, SparseLaw
from outrider.law.tree import Tree
from outrider.net.arrays import int32s
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import PlainReason

Reason: TypeAlias = PlainReason.ValueType

_NO_TOKENS = int32s(b"", "tokens")
NO_LAW = SparseLaw.concatenate([])


@dataclass(frozen=True)
class Proposal:
    """A block that passed the audit, or the reason why there is none.

    Attributes:
        tokens: [lookahead] int32.
        law: the laws that they were drawn from; without rows where the acceptance rule looks at none.
        reason: unspecified exactly when there are tokens.
        tree: the shape; None for a chain.
    """

    tokens: Int32Array
    law: SparseLaw
    reason: Reason = orchestrator_pb2.PLAIN_REASON_UNSPECIFIED
    tree: Tree | None = None

    def head(self, count: int) -> "Proposal":
        """The first tokens of the block. Where it is cut does not depend on them, so the output's law stays."""
        if count == len(self.tokens):
            return self
        if count == 0:
            return no_block(orchestrator_pb2.PLAIN_REASON_DISABLED)
        if self.tree is None:
            return Proposal(self.tokens[:count], self.law.head(count))
        law = self.tree.law_of_head(self.law, count) if len(self.law.sizes) else self.law
        return Proposal(self.tokens[:count], law, tree=self.tree.head(count))


def no_block(reason: Reason) -> Proposal:
    """A round without a block."""
    return Proposal(_NO_TOKENS, NO_LAW, reason)
