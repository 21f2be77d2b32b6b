"""The target as a teacher."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from outrider.distill.openings import Frame
from outrider.lm.attention import ATTENTION
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import require_only_parts
from outrider.lm.engine import ModelRefused
from outrider.lm.load import eos_token_ids, vocabulary_of_source
from outrider.lm.packed import pack_linears
from outrider.lm.quiet import Progress, quiet
from outrider.lm.refuse import refusing
from outrider.lm.sizing import context_length
from outrider.lm.source import ModelSource, SourceKind, parse_source
from outrider.lm.tokenizer import Vocabulary


@dataclass(frozen=True)
class Target:
    """What the teacher is.

    Attributes:
        model: with paged attention and packed weights.
        frame: around a user's turn.
        ends: end-of-sequence tokens.
        context_length: longest sequence in tokens.
    """

    source: ModelSource
    model: PreTrainedModel
    vocabulary: Vocabulary
    frame: Frame
    ends: tuple[int, ...]
    context_length: int

    @staticmethod
    def load(name: str, dtype: str, device: torch.device, progress: Progress) -> "Target":
        """Raises ModelRefused with one sentence when no draft can be distilled for this MODEL."""
        source = parse_source(name)
        if source.kind in (SourceKind.SYNTHETIC, SourceKind.DISTILLED):
            raise ModelRefused(
                f"a {source.kind.value} model has no layers to begin with, so no draft can be distilled for it"
            )
        with refusing(name), quiet(progress):
            config = load_config(source)
            vocabulary = vocabulary_of_source(source, "", config)
            model = load_weights(source, config, dtype, device)
            require_only_parts(model)
            model.set_attn_implementation(ATTENTION)
            pack_linears(model)
        return Target(
            source,
            model,
            vocabulary,
            Frame.of(vocabulary.tokenizer),
            eos_token_ids(model, vocabulary.size),
            context_length(config, 0),
        )
