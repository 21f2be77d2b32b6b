"""Which tokens may stand where, so that the output belongs to a language: llguidance behind an interface of ours.

What is ours: tokens are spelled as the client will see them; the session's stop tokens, and no others, end the output,
exactly where it is a member; every token that can go on to a member is allowed, not only the tokenizer's own way to
write it (llguidance would otherwise force that one, which is another law); the state is the replay of the generated
tokens, whatever was tried in between.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from outrider.law.language import Language
from outrider.law.masking import Words, word_count
from outrider.law.params import ParamError
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree

MAX_GRAMMAR_BYTES = 256 * 1024

# Compiled grammars kept at most; each holds the lexer states that its sessions found.
_MAX_COMPILED = 32
# A lexer state takes one to two kilobytes; the other limits are llguidance's defaults, some 20 ms of work each.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_MAX_MESSAGE = 400


class GrammarError(ParamError):
    """A grammar that cannot be compiled, or whose matching goes beyond the limits."""


class Grammars:
    """Compiles languages for one vocabulary and keeps the latest ones. May be used from several threads.

    Args:
        spellings: called at the first use; the bytes that each token adds to a text, by id; None for tokens that add
            none (special tokens, unused ids). The length is the vocabulary size. Making llguidance's tables of it takes
            a second for 150 000 tokens.
    """

    def __init__(self, spellings: Callable[[], Sequence[bytes | None]]) -> None:
        self._spellings = spellings
        self._tables: LLTokenizer | None = None
        self._compiled: OrderedDict[Language, LLMatcher] = OrderedDict()
        self._lock, self._making = Lock(), Lock()

    def state(self, language: Language, prompt_length: int, stop_token_ids: Iterable[int]) -> "GrammarState":
        """The state of a new session. Compiles the language when it is not among the latest.

        Raises GrammarError naming the field.
        """
        with self._lock:
            matcher = self._compiled.get(language)
        if matcher is None:
            matcher = self._compile(language)
        with self._lock:
            self._compiled[language] = matcher
            self._compiled.move_to_end(language)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return GrammarState(matcher, language, self.prepare().vocab_size - 1, prompt_length, stop_token_ids)

    def prepare(self) -> LLTokenizer:
        """llguidance's view of the vocabulary: all of it, and the end of the text as a token of its own. Made once."""
        with self._making:
            if self._tables is None:
                self._tables = _tables(self._spellings())
            return self._tables

    def _compile(self, language: Language) -> LLMatcher:
        matcher = LLMatcher(self.prepare(), _source(language), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _error(language, f"cannot be compiled: {matcher.get_error()}")
        # A language that the vocabulary cannot even begin to spell is refused now, not in the middle of a batch.
        GrammarState(matcher, language, self.prepare().vocab_size - 1, 0, ()).masks(np.empty(0, np.int32), 0)
        return matcher


class GrammarState:
    """Where one session stands in its language. Used by one thread at a time.

    Made by `Grammars.state`. Every method takes the session's tokens and moves to them, backwards by forgetting and
    forwards by consuming, so that what it says depends on them alone.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        language: Language,
        vocab_size: int,
        prompt_length: int,
        stop_token_ids: Iterable[int],
    ) -> None:
        self._compiled, self._language = compiled, language
        self._matcher = compiled.deep_copy()
        self._vocab_size, self._prompt_length = vocab_size, prompt_length
        self._stops = frozenset(stop_token_ids)
        # What the matcher has consumed: generated tokens, none of them a stop token.
        self._walked = np.empty(64, np.int32)
        self._length = 0

    def masks(self, tokens: Int32Array, first: int, tree: Tree | None = None) -> Words:
        """The tokens that may stand at positions first ... len(tokens), one bit each.

        Args:
            tokens: [n] int32, prompt, committed tokens and block.
            first: committed tokens; those from here on are candidates and may be illegal.
            tree: the block's shape; None for a chain. The rows are then its rows.

        Returns [n - first + 1, word_count(vocab_size)] uint32. Rows after an illegal candidate or a stop token are
        never used, and all ones. Raises GrammarError when the committed tokens are no beginning of a member, or leave
        nothing to go on with, or a limit is exceeded after them.
        """
        self._move(tokens[self._prompt_length : first])
        rows = np.full((len(tokens) - first + 1, word_count(self._vocab_size)), 0xFFFFFFFF, np.uint32)
        self._fill(rows[0])
        if tree is not None:
            self._fill_tree(rows, tokens[self._prompt_length :], first - self._prompt_length, tree)
            return rows
        for row, token in zip(rows[1:], tokens[first:].tolist(), strict=True):
            try:
                if not self._consume(token):
                    break
                self._fill(row)
            except GrammarError:
                break  # where candidates lead must not end a session that may never go there
        return rows

    def _fill_tree(self, rows: Words, generated: Int32Array, first: int, tree: Tree) -> None:
        """The rows of the candidates generated[first:], path after path: going back costs little."""
        filled = {0}
        for leaf in tree.leaves():
            self._move(generated[:first])
            for token in tree.path(leaf):
                row = token + 1
                try:
                    if not self._consume(int(generated[first + token])):
                        break
                    if row not in filled:
                        self._fill(rows[row])
                        filled.add(row)
                except GrammarError:
                    break  # as in a chain

    def legal(self, tokens: Int32Array, candidates: Int32Array) -> int:
        """How many of the candidates, from the first on, may follow the tokens. A stop token is the last that may.

        Raises GrammarError when the tokens are no beginning of a member.
        """
        self._move(tokens[self._prompt_length :])
        for index, token in enumerate(candidates.tolist()):
            if token in self._stops:
                return index + int(self._matcher.is_accepting())
            try:
                if not self._consume(token):
                    return index
            except GrammarError:
                return index
        return len(candidates)

    def _move(self, generated: Int32Array) -> None:
        shared = min(len(generated), self._length)
        differing = np.flatnonzero(self._walked[:shared] != generated[:shared])
        common = int(differing[0]) if len(differing) else shared
        if common < self._length:
            self._matcher.rollback(self._length - common)
            self._length = common
        for token in generated[common:].tolist():
            if not self._consume(token):
                raise _error(self._language, f"does not allow the committed token {token} after {self._length} others")

    def _consume(self, token: int) -> bool:
        """Goes on by one token; changes nothing when it is a stop token or illegal."""
        if token in self._stops or self._matcher.try_consume_tokens([token]) == 0:
            self._check()
            return False
        if self._length == len(self._walked):
            self._walked = np.concatenate([self._walked, np.empty_like(self._walked)])
        self._walked[self._length] = token
        self._length += 1
        return True

    def _fill(self, row: Words) -> None:
        end = self._vocab_size
        words = np.zeros(word_count(end + 1), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        row[:] = words[: len(row)]
        accepts = _bit(words, end)
        for token in self._stops:
            bit = np.uint32(1 << token % 32)
            row[token // 32] = row[token // 32] | bit if accepts else row[token // 32] & ~bit

    def _check(self) -> None:
        """Raises GrammarError when the matcher failed, which it never recovers from: a new one takes its place."""
        if not self._matcher.is_error():
            return
        message, length = self._matcher.get_error(), self._length
        self._matcher, self._length = self._compiled.deep_copy(), 0
        if "NoExtension" in message:
            message = "no token of the vocabulary can go on"
        raise _error(self._language, f"fails after {length} tokens: {message}")


def _bit(words: Words, index: int) -> bool:
    return bool(int(words[index // 32]) >> index % 32 & 1)


def _source(language: Language) -> str:
    size = len(language.text.encode("utf-8"))
    if size > MAX_GRAMMAR_BYTES:
        raise _error(language, f"has {size} bytes of UTF-8, limit {MAX_GRAMMAR_BYTES}")
    match language.kind:
        case "json_schema":
            return f"{_OPTIONS}start: %json {_schema(language)}"
        case "regex":
            if (len(language.text) - len(language.text.rstrip("\\"))) % 2:
                raise _error(language, "cannot be compiled: it ends within an escape sequence")
            return f"{_OPTIONS}start: /{regex_to_lark(language.text, '')}/"
        case _:
            return _OPTIONS + language.text


def _schema(language: Language) -> str:
    """The schema as one JSON object: nothing may follow it in the grammar that it stands in."""
    try:
        schema = json.loads(language.text)
    except (ValueError, RecursionError) as error:
        raise _error(language, f"is no JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _error(language, "is no JSON object")
    return json.dumps(schema)


def _error(language: Language, message: str) -> GrammarError:
    plain = message.replace("<non-verbose/>", "")
    return GrammarError(f"grammar.{language.kind}", " ".join(plain.split())[:_MAX_MESSAGE])


def _tables(spellings: Sequence[bytes | None]) -> LLTokenizer:
    end = len(spellings)
    return LLTokenizer(TokenizerWrapper(_Vocabulary([spelling or b"" for spelling in spellings])), n_vocab=end + 1)


class _Vocabulary:
    """What llguidance asks of a tokenizer. The end of the text is a token beyond the real ones."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [len(tokens)]

    def __call__(self, text: bytes) -> list[int]:
        """llguidance would tokenise to force the canonical spelling, which _OPTIONS turn off."""
        return []
