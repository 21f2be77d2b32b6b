"""What the demo asks: three kinds of prompt, each with the draft and the lookahead that suit it."""

from dataclasses import dataclass

from outrider.cli.options import PROPOSERS, ProposerName
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.types_pb2 import SamplingParams

_CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        self.balance -= amount
        return self.balance
"""

_QUOTED = """\
The draft rides ahead and proposes a block of tokens. The target scores the whole block in one pass. \
The orchestrator keeps the tokens that the target would have said, corrects the first one that it would not, \
and commits them to the session store before the client sees them. \
The output is exactly what the target alone would have written."""


@dataclass(frozen=True)
class DemoPrompt:
    """One of the demo's prompts.

    Attributes:
        kind: its column in the table.
        text: the user's message.
        proposer: what makes its blocks.
        lookahead: the block length that suits it, for those that cannot choose one each round.
    """

    kind: str
    text: str
    proposer: ProposerName
    lookahead: int

    def request(self, *, max_tokens: int, lookahead: int | None) -> pb.GenerateRequest:
        """A greedy request; lookahead 0 is the same without speculation, None leaves it to the orchestrator."""
        return pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=self.text)]),
            sampling=SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=max_tokens),
            speculation=pb.Speculation(lookahead=lookahead, proposer=PROPOSERS[self.proposer]),
        )


PROMPTS = (
    DemoPrompt("chat", "Why is the sky blue? Answer in a few sentences.", ProposerName.model, 4),
    DemoPrompt("writing", "Write a Python function that checks whether a number is prime.", ProposerName.model, 4),
    DemoPrompt(
        "code",
        f"Rename the class to Wallet. Answer with the whole code.\n\n```python\n{_CODE}```",
        ProposerName.prompt_lookup,
        8,
    ),
    DemoPrompt("quoting", f"Repeat this text word for word:\n\n{_QUOTED}", ProposerName.prompt_lookup, 8),
)
