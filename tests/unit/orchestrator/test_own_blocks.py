"""The window and the account of a session that is alone."""

from orchestrator.own_blocks import MOST_LOSS, OwnBlocks

PLAIN = 0.02


def test_the_window_doubles_and_halves() -> None:
    own = OwnBlocks(expected=2.0)
    assert own.window(16) == 4
    assert own.window(3) == 3
    own.grow(asked=4, drafted=4, accepted=4)
    assert own.window(16) == 8
    for _ in range(20):
        own.grow(asked=8, drafted=8, accepted=0)
    assert own.window(16) == 2


def test_a_copy_that_is_kept_whole_opens_the_window_though_it_is_short() -> None:
    own = OwnBlocks(expected=2.0)
    own.grow(asked=4, drafted=2, accepted=2)
    assert own.window(16) == 8
    own.grow(asked=8, drafted=0, accepted=0)
    assert own.window(16) == 8


def test_a_block_of_one_is_left_by_any_window() -> None:
    own = OwnBlocks(expected=0.1)
    assert own.window(16) == 1
    assert own.window(0) == 0


def test_losses_beyond_the_account_end_blocks_and_gains_bring_them_back() -> None:
    own = OwnBlocks(expected=2.0)
    own.lose(MOST_LOSS * PLAIN)
    assert not own.spent(PLAIN)
    own.lose(0.1 * PLAIN)
    assert own.spent(PLAIN)
    own.lose(-0.2 * PLAIN)
    assert not own.spent(PLAIN)
    own.lose(-100 * PLAIN)
    own.lose(1.1 * MOST_LOSS * PLAIN)
    assert own.spent(PLAIN), "what was gained long ago must not pay for losses of today"
