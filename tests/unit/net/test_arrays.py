import numpy as np
import pytest
import torch

from outrider.law.rows import SupportRows
from outrider.law.sparse import SparseLaw
from outrider.net import arrays
from outrider.net.bounds import MAX_LAW_TOP
from outrider.v1 import target_pb2, types_pb2


def test_tokens_round_trip_little_endian() -> None:
    data = arrays.to_bytes(np.array([1, -2, 2**31 - 1], dtype=np.int32))
    assert data == b"\x01\0\0\0\xfe\xff\xff\xff\xff\xff\xff\x7f"
    assert arrays.int32s(data, "x").tolist() == [1, -2, 2**31 - 1]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_ragged_bytes_name_their_field(length: int) -> None:
    with pytest.raises(arrays.ArrayError, match="draft_tokens"):
        arrays.int32s(b"\0" * length, "draft_tokens")


@pytest.mark.parametrize("bad", [-1, 8, 15, 2**31 - 1])
def test_b3_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    data = arrays.to_bytes(np.array([3, bad], dtype=np.int32))
    with pytest.raises(arrays.ArrayError, match=str(bad)):
        arrays.tokens_in_vocab(data, "draft_tokens", 8)


def test_prefix_hash_is_incremental() -> None:
    tokens = np.arange(100, dtype=np.int32)
    growing = arrays.PrefixHash()
    for start in range(0, 100, 7):
        growing.extend(tokens[start : start + 7])
        assert growing.value() == arrays.prefix_hash(tokens[: start + 7])


def test_a_block_carries_its_law_bit_for_bit() -> None:
    law = SparseLaw.concatenate(
        [
            (np.array([4, 2], np.int32), np.array([0.7, 0.3], np.float32)),
            (np.array([1], np.int32), np.array([1.0], np.float32)),
        ]
    )
    message = arrays.block_message(np.array([4, 1], np.int32), law)
    back = arrays.law_from_message(message.law, 2)
    assert back.probs.tobytes() == law.probs.tobytes()
    assert back.row(1)[0].tolist() == [1]
    assert back.head(1).token_ids.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("sizes", "ids", "probs"), [([2], [1], [1.0]), ([0, 1], [1], [1.0]), ([-1, 2], [1], [1.0]), ([1], [1], [])]
)
def test_laws_with_wrong_shapes_are_refused(sizes: list[int], ids: list[int], probs: list[float]) -> None:
    message = types_pb2.DraftLaw(
        sizes=np.array(sizes, "<i4").tobytes(),
        token_ids=np.array(ids, "<i4").tobytes(),
        probs=np.array(probs, "<f4").tobytes(),
    )
    with pytest.raises(arrays.ArrayError):
        arrays.law_from_message(message, len(sizes))


def test_a_law_of_more_entries_than_its_tokens_may_have_is_refused_unread() -> None:
    entries = 2 * MAX_LAW_TOP + 1
    message = types_pb2.DraftLaw(
        sizes=np.array([1, entries - 1], "<i4").tobytes(), token_ids=bytes(4 * entries), probs=bytes(4 * entries)
    )
    with pytest.raises(arrays.ArrayError, match=f"law.token_ids has {4 * entries} bytes, limit {4 * entries - 4}"):
        arrays.law_from_message(message, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_travel_in_the_dtype_they_were_computed_in(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    message = arrays.logits_message(rows)
    assert len(message.data) == rows.numel() * dtype.itemsize
    assert torch.equal(arrays.logits_from_message(message, 3), rows.float())


def test_j4_rows_cut_from_a_padded_head_are_contiguous_on_the_wire() -> None:
    padded = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    message = arrays.logits_message(padded[:, :11])
    assert torch.equal(arrays.logits_from_message(message, 2), padded[:, :11])


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_another_shape_are_refused(rows: int) -> None:
    message = arrays.logits_message(torch.zeros(2, 5))
    with pytest.raises(arrays.ArrayError, match="need"):
        arrays.logits_from_message(message, rows)


def test_logits_without_dtype_are_refused() -> None:
    with pytest.raises(arrays.ArrayError, match="dtype"):
        arrays.logits_from_message(target_pb2.LogitsRows(data=b"\0" * 4, vocab_size=1), 1)


def _support() -> SupportRows:
    return SupportRows(
        np.array([0.5, 0.25, 1e-30], np.float32), np.array([0.25, 1.0 - 1e-15]), np.array([3, 0], np.int32)
    )


def test_support_rows_travel_bit_for_bit() -> None:
    rows = arrays.support_from_message(arrays.support_message(_support()), entries=3, lookahead=1, vocab_size=4)
    assert rows.probs.tolist() == _support().probs.tolist()
    assert rows.tail_masses.tolist() == _support().tail_masses.tolist()
    assert rows.tail_tokens.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("probs", b"\0" * 8),
        ("tail_masses", b"\0" * 8),
        ("tail_masses", b"\0" * 12),
        ("tail_tokens", b"\0" * 12),
        ("tail_tokens", arrays.to_bytes(np.array([4, 0], np.int32))),
    ],
)
def test_support_rows_of_another_shape_are_refused(field: str, value: bytes) -> None:
    message = arrays.support_message(_support())
    setattr(message, field, value)
    with pytest.raises(arrays.ArrayError):
        arrays.support_from_message(message, entries=3, lookahead=1, vocab_size=4)


def test_sample_rows_are_one_token_a_row() -> None:
    message = arrays.sample_message(np.array([3, 0], np.int32))
    assert arrays.sample_from_message(message, 1, 4).tolist() == [3, 0]
    for lookahead, vocab_size in ((2, 4), (0, 4), (1, 3)):
        with pytest.raises(arrays.ArrayError):
            arrays.sample_from_message(message, lookahead, vocab_size)


def test_a_block_may_travel_without_its_law() -> None:
    assert not arrays.block_message(np.array([1], np.int32), None).HasField("law")


def test_a_trees_law_may_have_empty_rows() -> None:
    sizes, ids = np.array([2, 0, 1], np.int32), np.array([5, 7, 2], np.int32)
    message = arrays.block_message(ids, SparseLaw(sizes, ids, np.array([0.5, 0.5, 1.0], np.float32))).law
    with pytest.raises(arrays.ArrayError, match="below 1"):
        arrays.law_from_message(message, 3)
    assert arrays.law_from_message(message, 3, tree=True).sizes.tolist() == [2, 0, 1]
    message.sizes = arrays.to_bytes(np.array([2, -1, 2], np.int32))
    with pytest.raises(arrays.ArrayError, match="below 0"):
        arrays.law_from_message(message, 3, tree=True)
