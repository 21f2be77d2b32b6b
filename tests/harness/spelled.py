"""A model over a tokenizer that can spell JSON, without weights."""

from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import vocabulary_of


class SpelledEngine(SyntheticEngine):
    """The logits of a synthetic model, the vocabulary of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        vocabulary = vocabulary_of(tokenizer)
        super().__init__(SyntheticSpec(vocab_size=vocabulary.size, seed=seed, eos=tokenizer.eos_token_id))
        self._info = replace(
            self._info,
            vocab_fingerprint=vocabulary.fingerprint,
            token_hashes=vocabulary.token_hashes,
            tokenizer=tokenizer,
        )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> str:
    """Makes a MODEL of the directory, for the tokenizer alone."""
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return str(directory)
