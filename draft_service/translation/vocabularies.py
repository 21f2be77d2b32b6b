"""The two vocabularies of a draft worker whose model has another tokenizer than its target."""

from dataclasses import dataclass, replace

from draft_service.translation.lexicon import Lexicon
from draft_service.translation.reading import Reading
from draft_service.translation.shared import SharedTokens
from outrider.lm.engine import EngineInfo
from outrider.lm.tokenizer import Vocabulary

# Room that the context keeps for own tokens drawn beyond what is read.
_SHARE_OF_CONTEXT, _MOST_RESERVED = 4, 512


@dataclass(frozen=True)
class Vocabularies:
    """What translates.

    Attributes:
        target, own: the tokenizers.
        shared: the tokens of both.
        info: what the worker serves: the draft model, in the target's tokens.
        most: own tokens that are read at most.
    """

    target: Lexicon
    own: Lexicon
    shared: SharedTokens
    info: EngineInfo
    most: int

    @staticmethod
    def of(engine: EngineInfo, vocabulary: Vocabulary, target: str) -> "Vocabularies":
        """Between an engine's own vocabulary and the `vocabulary` of the MODEL `target`.

        Raises ModelRefused with one sentence where there is no way between them.
        """
        lexicon = Lexicon(vocabulary.tokenizer, target, vocabulary.size)
        own = Lexicon(engine.tokenizer, engine.model_id, engine.vocab_size)
        shared = SharedTokens(lexicon, own)
        shared.require(engine.model_id, target)
        info = replace(
            engine,
            vocab_size=vocabulary.size,
            padded_vocab_size=vocabulary.size,
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes,
            tokenizer=vocabulary.tokenizer,
            eos_token_ids=() if lexicon.eos is None else (lexicon.eos,),
        )
        reserved = min(engine.context_length // _SHARE_OF_CONTEXT, _MOST_RESERVED)
        return Vocabularies(lexicon, own, shared, info, engine.context_length - reserved)

    def reading(self) -> Reading:
        """Of a new sequence."""
        return Reading(self.target, self.own, self.shared, self.most)

    @property
    def lonely(self) -> int:
        """What the draft model is given where there is nothing to read."""
        return next((token for token in (self.own.bos, self.own.eos) if token is not None), 0)
