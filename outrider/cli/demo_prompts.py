"""What the demo asks: three kinds of prompt, each with the proposer that suits it."""

from dataclasses import dataclass

from outrider.cli.options import PROPOSERS, ProposerName
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1.types_pb2 import SamplingParams

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
    """

    kind: str
    text: str
    proposer: ProposerName

    def request(self, *, max_tokens: int, lookahead: int) -> pb.GenerateRequest:
        """A greedy request; lookahead 0 is the same without speculation."""
        return pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=self.text)]),
            sampling=SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=max_tokens),
            speculation=pb.Speculation(lookahead=lookahead, proposer=PROPOSERS[self.proposer]),
        )


PROMPTS = (
    DemoPrompt("chat", "Why is the sky blue? Answer in a few sentences.", ProposerName.early_exit),
    DemoPrompt("code", "Write a Python function that checks whether a number is prime.", ProposerName.early_exit),
    DemoPrompt("quoting", f"Repeat this text word for word:\n\n{_QUOTED}", ProposerName.prompt_lookup),
)
