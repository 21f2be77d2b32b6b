"""Options that several commands share."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from outrider.net.bounds import MAX_LOOKAHEAD
from outrider.v1 import draft_pb2

DEFAULT_PORT = 7800


class ProposerName(StrEnum):
    """Proposers as the command line spells them."""

    model = "model"
    early_exit = "early_exit"
    medusa = "medusa"
    eagle = "eagle"
    prompt_lookup = "prompt_lookup"
    prediction = "prediction"
    suffix = "suffix"
    suffix_or_model = "suffix_or_model"
    auto = "auto"


class LogLevel(StrEnum):
    """Log levels of the services."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


PROPOSERS: "dict[ProposerName, draft_pb2.Proposer.ValueType]" = {
    ProposerName.model: draft_pb2.PROPOSER_MODEL,
    ProposerName.early_exit: draft_pb2.PROPOSER_EARLY_EXIT,
    ProposerName.medusa: draft_pb2.PROPOSER_MEDUSA,
    ProposerName.eagle: draft_pb2.PROPOSER_EAGLE,
    ProposerName.prompt_lookup: draft_pb2.PROPOSER_PROMPT_LOOKUP,
    ProposerName.prediction: draft_pb2.PROPOSER_PREDICTION,
    ProposerName.suffix: draft_pb2.PROPOSER_SUFFIX,
    ProposerName.suffix_or_model: draft_pb2.PROPOSER_SUFFIX_OR_MODEL,
    ProposerName.auto: draft_pb2.PROPOSER_AUTO,
}

# What a worker offers for those that are more than one.
_SEVERAL = {
    ProposerName.auto: (ProposerName.model, ProposerName.suffix, ProposerName.suffix_or_model),
    ProposerName.suffix_or_model: (ProposerName.suffix_or_model, ProposerName.model),
}


def offered(names: Iterable[ProposerName]) -> tuple[str, ...]:
    """What a draft worker is to offer for these, in order; for `auto` the model, copies, and the model after copies."""
    each = (one for name in names for one in _SEVERAL.get(name, (name,)))
    return tuple(dict.fromkeys(one.value for one in each))


Address = Annotated[
    str, typer.Option(envvar="OUTRIDER_ADDRESS", help="HOST:PORT of the orchestrator.", metavar="HOST:PORT")
]
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"

Dtype = Annotated[str, typer.Option(help="Numeric type of the weights: float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help='Where the models run: "cpu" or "cuda".')]
LONGEST_LOOKAHEAD = MAX_LOOKAHEAD
Lookahead = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=LONGEST_LOOKAHEAD,
        help="Longest block of draft tokens; 0 is plain decoding; left out, every round's is chosen by goodput.",
    ),
]
EarlyExitLayers = Annotated[
    int, typer.Option(min=0, help="Layers of the target that the early_exit draft runs; 0 leaves the choice to it.")
]
EarlyExit = Annotated[
    str, typer.Option(help="Trained exit of the target that the early_exit draft runs instead.", metavar="DIR")
]
Medusa = Annotated[str, typer.Option(help="Directory of the target's Medusa heads.", metavar="DIR")]
Eagle = Annotated[str, typer.Option(help="Directory of the target's EAGLE head.", metavar="DIR")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads of the worker's model; 0 leaves the choice.")]
MeasureThreads = Annotated[
    bool,
    typer.Option("--measure-threads/--half-threads", help="Whether to measure; else half of the cores for each model."),
]
