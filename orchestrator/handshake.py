"""The pairing check: a worker is used only when its law and vocabulary are the tokenizer's."""

from outrider.law.params import LAW_VERSION
from outrider.lm.tokenizer import Vocabulary, first_difference
from outrider.net.arrays import ArrayError, tokens_in_vocab
from outrider.v1 import types_pb2

_LONGEST_NAME = 1_024


class PairRefused(Exception):
    """The worker does not fit; the message names the first difference."""


def check_pair(worker: str, info: types_pb2.ModelInfo, vocabulary: Vocabulary) -> None:
    """Raises PairRefused when the worker's model does not go with the orchestrator's tokenizer.

    `info.token_hashes` must be filled when the fingerprints differ, to name the first differing id.
    """
    for name in (info.model_id, info.dtype):
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise PairRefused(f"{worker} calls its model or dtype what is no name: {name[:_LONGEST_NAME]!r}")
    if len(info.token_hashes) % 4:
        raise PairRefused(f"{worker} ({info.model_id}) has token hashes of {len(info.token_hashes)} bytes")
    try:
        tokens_in_vocab(info.eos_token_ids, "eos_token_ids", info.vocab_size)
    except ArrayError as error:
        raise PairRefused(f"{worker} ({info.model_id}): {error}") from error
    if info.law_version != LAW_VERSION:
        raise PairRefused(f"{worker} ({info.model_id}) has law version {info.law_version}, ours is {LAW_VERSION}")
    if fingerprints_differ(info, vocabulary):
        differing = first_difference(vocabulary.token_hashes, info.token_hashes)
        where = "in token texts" if differing is None else f"first at token id {differing}"
        raise PairRefused(
            f"{worker} ({info.model_id}) has another vocabulary than the tokenizer, {where} "
            f"({info.vocab_size} tokens, the tokenizer has {vocabulary.size})"
        )


def fingerprints_differ(info: types_pb2.ModelInfo, vocabulary: Vocabulary) -> bool:
    """Whether the vocabularies differ; `check_pair` then needs `token_hashes`."""
    return (info.vocab_fingerprint, info.vocab_size) != (vocabulary.fingerprint, vocabulary.size)
