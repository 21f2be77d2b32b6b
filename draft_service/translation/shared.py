"""The tokens that two vocabularies share: those that spell the same bytes."""

import numpy as np
import numpy.typing as npt

from draft_service.translation.lexicon import Lexicon
from outrider.lm.engine import ModelRefused

# Of the smaller vocabulary. A law on fewer tokens than these says nothing of what the model knows.
_LEAST_SHARE = 0.01


class SharedTokens:
    """Pairs of (target's, own) tokens, each token in one pair at most.

    Attributes:
        targets, own: [n] int64, the pairs by ascending target id.
        specials: own special tokens of the target's: of the same name, or what begins or ends a text in both.
        spelled: how many of the pairs spell something.
        size, own_size: real token ids of the two vocabularies.
    """

    def __init__(self, target: Lexicon, own: Lexicon) -> None:
        self.specials = _specials(target, own)
        spelled = {index: own.ids[piece] for piece, index in target.ids.items() if piece in own.ids}
        self.spelled = len(spelled)
        pairs = np.array(sorted((spelled | self.specials).items()), np.int64).reshape(-1, 2)
        self.targets, self.own = (np.ascontiguousarray(column) for column in pairs.T)
        self.size, self.own_size = len(target.pieces), len(own.pieces)
        self._to_target = np.full(self.own_size, -1, np.int64)
        self._to_target[self.own] = self.targets
        self._smaller = min(len(target.ids), len(own.ids))

    def require(self, model: str, target: str) -> None:
        """Raises ModelRefused when the vocabularies have too little in common."""
        if self.spelled <= _LEAST_SHARE * self._smaller:
            message = (
                f"{model} shares {self.spelled} of its {self.own_size} tokens with {target}: too few to draft for it"
            )
            raise ModelRefused(message)

    def targets_of(self, own: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """[n] the target's tokens of own ones; -1 where there is none."""
        found: npt.NDArray[np.int64] = self._to_target[own]
        return found

    def own_of(self, tokens: "tuple[int, ...]") -> dict[int, int]:
        """The own token of each of the target's tokens that has one."""
        wanted = np.array(tokens, np.int64)
        at = np.searchsorted(self.targets, wanted)
        found = np.flatnonzero(np.append(self.targets, -1)[at] == wanted)
        return {int(wanted[index]): int(self.own[at[index]]) for index in found}


def _specials(target: Lexicon, own: Lexicon) -> dict[int, int]:
    pairs = {index: own.specials[name] for name, index in target.specials.items() if name in own.specials}
    for one, other in ((target.eos, own.eos), (target.bos, own.bos)):
        if one is not None and other is not None and one not in pairs and other not in pairs.values():
            pairs[one] = other
    return pairs
