import numpy as np
import pytest

from orchestrator.prefix import PeerPrefix, TokenBuffer
from outrider.net.arrays import int32s, prefix_hash


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_buffer_grows_and_keeps_order() -> None:
    buffer = TokenBuffer(tokens(1))
    for value in range(2, 200):
        buffer.append(tokens(value))
    assert buffer.view().tolist() == list(range(1, 200))
    assert buffer.view(3, 5).tolist() == [4, 5]
    assert len(buffer) == 199


def test_buffer_does_not_alias_its_argument() -> None:
    source = tokens(1, 2)
    buffer = TokenBuffer(source)
    source[0] = 9
    assert buffer.view().tolist() == [1, 2]


def test_views_do_not_reach_past_the_length() -> None:
    buffer = TokenBuffer(tokens(1, 2, 3))
    buffer.append(tokens(4))
    assert buffer.view(0, 100).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("known", [0, 1, 4, 5, 9])
def test_suffix_carries_at_least_the_last_token_and_hashes_the_rest(known: int) -> None:
    buffer = TokenBuffer(tokens(3, 1, 4, 1, 5))
    peer = PeerPrefix()
    peer.known = known
    carried, digest = peer.suffix(buffer)
    start = min(known, 4)
    assert int32s(carried, "x").tolist() == [3, 1, 4, 1, 5][start:]
    assert digest == prefix_hash(buffer.view(0, start))


def test_suffix_hash_follows_growth_and_going_back() -> None:
    buffer, peer = TokenBuffer(tokens(1, 2, 3)), PeerPrefix()
    for known, added in ((2, 4), (3, 5), (1, 6), (6, 7), (0, 8), (7, 9)):
        peer.known = known
        _, digest = peer.suffix(buffer)
        assert digest == prefix_hash(buffer.view(0, min(known, len(buffer) - 1)))
        buffer.append(tokens(added))


def test_lost_carries_everything() -> None:
    buffer, peer = TokenBuffer(tokens(7, 8, 9)), PeerPrefix()
    peer.known = 2
    peer.lost()
    assert int32s(peer.suffix(buffer)[0], "x").tolist() == [7, 8, 9]
