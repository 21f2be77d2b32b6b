"""What a session that is alone makes of its own blocks, sooner than rates do: of its text nothing else tells."""

# Plain rounds of time that blocks may lose it, less what they gained.
MOST_LOSS = 4.0


class OwnBlocks:
    """Bounds what blocks cost a session whose text the draft may not know, whatever others were given.

    Args:
        expected: tokens that the sessions before got from a round with the longest block.
    """

    def __init__(self, expected: float) -> None:
        # As a window that doubles when all is well.
        self._longest = 2.0 * expected
        # Seconds lost, since nothing was.
        self._lost = 0.0

    def window(self, limit: int) -> int:
        """The longest block to think of, of those up to `limit`."""
        return min(limit, max(1, int(self._longest)))

    def spent(self, plain: float) -> bool:
        """Whether there are to be no more, where a plain round takes `plain` seconds."""
        return self._lost > MOST_LOSS * plain

    def grow(self, asked: int, drafted: int, accepted: int) -> None:
        """A block of `drafted` tokens came where `asked` were wanted. One that did not come tells nothing."""
        if drafted and accepted >= drafted:
            self._longest = max(self._longest, 2.0 * asked)
        elif drafted:
            self._longest += (accepted + 2 - self._longest) / 2.0

    def lose(self, seconds: float) -> None:
        """What a round took longer than plain ones for its tokens; negative where it was quicker."""
        self._lost = max(0.0, self._lost + seconds)
