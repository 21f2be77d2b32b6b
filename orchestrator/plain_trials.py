"""When all sessions decode plainly for some rounds though blocks seem to pay: to see what that takes.

Rounds with blocks do not tell it, where the draft takes of the target's cores and caches.
"""

from dataclasses import dataclass

from orchestrator.costs import TargetCosts

# A trial lasts until so many passes without blocks were seen; and on, while each round makes plain ones look so much
# better, but for no more rounds than this.
_PASSES, _SURPRISE, _LONGEST = 2, 0.02, 12
# Rounds between two trials at the least, and the part of all tokens that they may cost.
_BETWEEN, _SHARE = 64, 0.003


@dataclass
class PlainTrials:
    """The trials of the sessions that share a draft history.

    Attributes:
        on: whether the coming round is one of a trial.
    """

    on: bool = False
    _loss: float = 0.0
    _rounds: int = 0
    _lasted: int = 0
    _passes_before: int = 0

    def round(self, target: TargetCosts, loss: float, *, blocks: bool) -> None:
        """Decides about the coming round of all sessions.

        Args:
            loss: the part of goodput that plain rounds are thought to lose, below 1; negative where they win.
            blocks: whether rounds have blocks but for trials.
        """
        self._rounds += 1
        pause = max(_BETWEEN, self._lasted * loss / _SHARE)
        surprised, self._loss = self._loss - loss > _SURPRISE, loss
        seen = target.plain_passes - self._passes_before
        if self.on and ((seen >= _PASSES and not surprised) or self._rounds >= _LONGEST):
            self.on, self._lasted, self._rounds = False, self._rounds, 0
        elif not blocks:
            self.on, self._rounds = False, 0
        elif not self.on and (self._rounds >= pause or not self._lasted):
            self.on, self._rounds, self._passes_before = True, 0, target.plain_passes
