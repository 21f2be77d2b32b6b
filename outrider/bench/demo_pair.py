"""The pair that is measured when none is named: the demo's."""

from collections.abc import Mapping

from outrider.bench.services import Drafted
from outrider.cli.demo import demo_draft
from outrider.cli.demo_prompts import PROMPTS
from outrider.cli.options import ProposerName
from outrider.cli.system import SystemOptions
from outrider.cli.weights import fetch

PROPOSERS = (ProposerName.model, ProposerName.prompt_lookup)


def demo_system() -> SystemOptions:
    """Its models, downloaded where they are not there. Raises Failure."""
    model = f"gguf:{fetch()}"
    return SystemOptions(
        target=model,
        draft=demo_draft(model),
        proposers=tuple(it.value for it in PROPOSERS),
        dtype="bfloat16",
    )


def demo_drafted(lookahead: int | None) -> Mapping[str, Drafted]:
    """What suits each kind of prompt; None lets the orchestrator choose the lookahead."""
    return {it.kind: Drafted(lookahead, it.proposer, fixed=it.lookahead) for it in PROMPTS}
