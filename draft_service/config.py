"""Settings of the draft service."""

from enum import StrEnum
from functools import cached_property

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.config import WorkerConfig
from outrider.v1 import draft_pb2
from outrider.v1.draft_pb2 import Proposer

PROPOSERS: dict[str, Proposer.ValueType] = {
    "model": draft_pb2.PROPOSER_MODEL,
    "early_exit": draft_pb2.PROPOSER_EARLY_EXIT,
    "prompt_lookup": draft_pb2.PROPOSER_PROMPT_LOOKUP,
    "prediction": draft_pb2.PROPOSER_PREDICTION,
    "medusa": draft_pb2.PROPOSER_MEDUSA,
    "eagle": draft_pb2.PROPOSER_EAGLE,
    "suffix": draft_pb2.PROPOSER_SUFFIX,
    "suffix_or_model": draft_pb2.PROPOSER_SUFFIX_OR_MODEL,
}
COPYING_SUFFIXES = {draft_pb2.PROPOSER_SUFFIX, draft_pb2.PROPOSER_SUFFIX_OR_MODEL}
# Tokens; some outputs' worth.
LEAST_HISTORY = 1_024
PROPOSER_NAMES = {number: name for name, number in PROPOSERS.items()}


class TranslationWay(StrEnum):
    """How a draft model with another vocabulary than its target's drafts."""

    AUTO = "auto"
    INTERSECTION = "intersection"
    STRING = "string"
    OFF = "off"


class DraftConfig(WorkerConfig):
    """The draft service: proposes blocks of candidate tokens."""

    model_config = SettingsConfigDict(cli_prog_name="python -m draft_service")

    proposers: str = Field(
        "model,prediction",
        description="what to offer: model, early_exit, medusa, eagle, prompt_lookup, prediction, suffix, "
        "suffix_or_model",
    )
    early_exit_layers: int = Field(0, ge=0, description="layers of the model that early_exit runs")
    early_exit: str = Field("", description="directory of a trained exit that early_exit runs instead of bare layers")
    medusa: str = Field("", description="directory of the target's Medusa heads; the model is the target then")
    eagle: str = Field("", description="directory of the target's EAGLE head; the model is the target then")
    ahead_blocks: int = Field(
        2, ge=0, le=8, description="blocks of a session drafted ahead of what is known to be committed; 0: none"
    )
    ahead_others: int = Field(
        2, ge=0, le=8, description="blocks drafted for less likely outcomes once those are there; not pushed"
    )
    suffix_tokens: int = Field(
        4_194_304,
        ge=1,
        description="tokens of sessions that suffix keeps indexed, some 40 bytes each; older ones are made anew",
    )
    suffix_history: int = Field(
        0,
        ge=0,
        le=16_777_216,
        description="tokens of earlier outputs to keep of each tenant and draft from for that tenant; 0: none",
    )
    suffix_history_tenants: int = Field(
        64, ge=1, description="tenants whose outputs are kept; the least recent one goes"
    )
    suffix_history_ttl: float = Field(
        3_600.0, gt=0, description="seconds after which the outputs of a tenant without sessions are forgotten"
    )
    target_model: str = Field(
        "",
        description="MODEL of the target: a distilled draft shares its embeddings (empty: it names one), a model with "
        "another vocabulary translates into its tokens (empty: it does not)",
    )
    translation: TranslationWay = Field(
        TranslationWay.AUTO,
        description="how a model with another vocabulary drafts: auto, intersection, string, off",
    )

    @field_validator("proposers")
    @classmethod
    def _known(cls, value: str) -> str:
        names = value.split(",")
        for name in names:
            if name not in PROPOSERS:
                raise ValueError(f"{name!r} is no proposer, there are {', '.join(PROPOSERS)}")
        if len(set(names)) < len(names):
            raise ValueError("a proposer stands twice")
        return value

    @field_validator("suffix_history")
    @classmethod
    def _worth_it(cls, value: int) -> int:
        if 0 < value < LEAST_HISTORY:
            raise ValueError(f"fewer than {LEAST_HISTORY} tokens are of no use; 0 keeps none")
        return value

    @model_validator(mode="after")
    def _layers(self) -> "DraftConfig":
        if draft_pb2.PROPOSER_EARLY_EXIT in self.kinds and bool(self.early_exit_layers) == bool(self.early_exit):
            raise ValueError("early_exit needs one of --early-exit-layers and --early-exit")
        if (draft_pb2.PROPOSER_MEDUSA in self.kinds) != bool(self.medusa):
            raise ValueError("the proposer medusa and --medusa go together")
        if (draft_pb2.PROPOSER_EAGLE in self.kinds) != bool(self.eagle):
            raise ValueError("the proposer eagle and --eagle go together")
        if self.medusa and self.eagle:
            raise ValueError("medusa and eagle are fed with other features: a worker offers one of them")
        if draft_pb2.PROPOSER_SUFFIX_OR_MODEL in self.kinds and draft_pb2.PROPOSER_MODEL not in self.kinds:
            raise ValueError("suffix_or_model needs the proposer model beside it")
        if self.suffix_history and not COPYING_SUFFIXES & {*self.kinds}:
            raise ValueError("--suffix-history needs suffix or suffix_or_model, which alone draft from what is kept")
        return self

    @cached_property
    def kinds(self) -> tuple[Proposer.ValueType, ...]:
        """The proposers on offer, first the default."""
        return tuple(PROPOSERS[name] for name in self.proposers.split(","))
