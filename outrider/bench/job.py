"""What a measurement is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.bench.runner import Plan
from outrider.bench.sample import Asked
from outrider.bench.services import Drafted
from outrider.cli.options import ProposerName
from outrider.cli.system import SystemOptions
from outrider.v1 import orchestrator_pb2 as pb


@dataclass(frozen=True)
class Compared:
    """What is measured beside our own two ways.

    Attributes:
        loop: the bare loop.
        transformers: transformers' own generation.
        endpoints: base URLs of OpenAI-compatible endpoints.
        openai_model, openai_key: for them; empty takes the first model listed, and sends no key.
    """

    loop: bool = False
    transformers: bool = False
    endpoints: tuple[str, ...] = ()
    openai_model: str = ""
    openai_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        system: what to start; None measures the orchestrator at `address`.
        address: host:port.
        plan, asked: how much, and what every way is asked for.
        lookahead: longest block; None takes the orchestrator's default.
        proposer: what makes the blocks; None takes the draft worker's default.
        drafted: how the blocks of single prompt sets are made, in place of these two.
        acceptance: the rule; None leaves it to the orchestrator.
        compared: what else is measured.
        seconds: deadline of one answer.
    """

    plan: Plan
    asked: Asked
    system: SystemOptions | None = None
    address: str = ""
    lookahead: int | None = None
    proposer: ProposerName | None = None
    drafted: Mapping[str, Drafted] = field(default_factory=dict)
    acceptance: "pb.Acceptance.ValueType | None" = None
    compared: Compared = Compared()
    seconds: float = 600.0
