"""Grammars of a service's sessions: over the spelling of its tokenizer, and with the errors of the wire."""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from outrider.law.grammar import GrammarError, Grammars, GrammarState
from outrider.law.masking import Words
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array
from outrider.law.tree import Tree
from outrider.lm.pieces import PieceTable, piece_table
from outrider.net.errors import invalid_field


class SessionGrammars:
    """Makes the grammar states of sessions.

    Args:
        tokenizer: what spells the tokens; None where nothing does: every grammar is refused then.
        vocab_size: real token ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        table = piece_table(backend) if isinstance(backend, Tokenizer) else None
        self._grammars = Grammars(lambda: _spellings(table, vocab_size)) if table is not None else None

    def prepare(self) -> None:
        """Makes the vocabulary's tables now, which `open` would do: a second or so that no session need wait for."""
        if self._grammars is not None:
            self._grammars.prepare()

    def open(self, params: LawParams) -> "SessionGrammar | None":
        """The grammar of a new session; None when its law has none. Raises OutriderError INVALID_FIELD."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise invalid_field("grammar cannot be matched: the model's tokens have no spelling of their own")
        try:
            return SessionGrammar(self._grammars.state(params.grammar, params.prompt_length, params.stop_token_ids))
        except GrammarError as error:
            raise invalid_field(str(error)) from error


class SessionGrammar:
    """A GrammarState, whose methods and conditions these are; they raise OutriderError INVALID_FIELD."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def masks(self, tokens: Int32Array, first: int, tree: Tree | None = None) -> Words:
        """The tokens that may stand at positions first ... len(tokens), see GrammarState."""
        try:
            return self._state.masks(tokens, first, tree)
        except GrammarError as error:
            raise invalid_field(str(error)) from error

    def legal(self, tokens: Int32Array, candidates: Int32Array) -> int:
        """How many of the candidates may follow the tokens, see GrammarState."""
        try:
            return self._state.legal(tokens, candidates)
        except GrammarError as error:
            raise invalid_field(str(error)) from error


def _spellings(table: PieceTable, vocab_size: int) -> list[bytes | None]:
    pieces = [table[token] for token in range(vocab_size)]
    return [piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece for piece in pieces]
