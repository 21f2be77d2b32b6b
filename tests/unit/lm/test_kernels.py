"""Kernels of ours compute what torch does, and a row depends on nothing that is beside it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outrider.lm import kernels as package
from outrider.lm import load, packed
from outrider.lm.attention import PagedPass
from outrider.lm.branches import Branches
from outrider.lm.causal_lm import CausalLm
from outrider.lm.engine import Segment
from outrider.lm.features import Tap
from outrider.lm.kernels import kernels, panels
from outrider.lm.kernels.panels import panelled
from outrider.lm.kv_storage import KvStorage, LayerShape
from outrider.lm.packed import KernelLinear
from outrider.lm.ragged import Piece, RaggedBatch
from tests.harness.engines_lm import own_logits, own_model, text, tiny_engine
from tests.unit.lm.test_fused import TAKEN
from tests.unit.lm.test_trees import expect

pytestmark = pytest.mark.skipif(kernels() is None, reason="no numba, or a processor without what the kernels need")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")
HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take every linear layer, of float32 too."""
    monkeypatch.setattr(packed, "_can_pack", lambda _linear: False)
    monkeypatch.setattr(packed, "_suits_kernels", lambda linear: linear.in_features % 8 == 0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@HALF
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (67, 48), (1, 0, 48), (2, 3, 48), (1, 1352), (4, 1352)])
@torch.inference_mode()
def test_a_linear_layer_is_the_plain_one(shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(shape[-1], 33, bias=bias, dtype=dtype)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual, expected = KernelLinear(plain)(inputs), plain(inputs)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@torch.inference_mode()
def test_a_layer_is_rounded_before_it_is_added_to_the_residual() -> None:
    """As torch rounds in bfloat16, operation by operation: a product of 1 + 2^-8 becomes 1, not a part of the sum."""
    from outrider.lm.kernels.products import BFLOAT16, linear

    layer, inputs = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), torch.zeros(1, 8)
    layer.weight.fill_(0.0)
    layer.weight[:, 0], layer.weight[:, 1] = 1.0, 2.0**-8
    inputs[:, :2] = 1.0
    residual = torch.full((1, 8), 2.0**-7)
    packed_layer = KernelLinear(layer)
    linear(BFLOAT16, packed_layer.record[()], 0, 8, 1, inputs.data_ptr(), 32, residual.data_ptr(), True)
    expected = layer(inputs.bfloat16()) + torch.tensor(2.0**-7, dtype=torch.bfloat16)
    assert torch.equal(residual, expected.float())
    assert residual[0, 0] == 1.0078125  # 1.015625 without the rounding


@HALF
@pytest.mark.parametrize("long", [200, 1352])  # the second is summed in three parts
@torch.inference_mode()
def test_a_row_of_a_linear_layer_is_the_same_in_every_batch(dtype: torch.dtype, long: int, two_threads: None) -> None:
    linear = KernelLinear(nn.Linear(long, 37, dtype=dtype))
    inputs = torch.randn(70, long, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = torch.cat([linear(row[None]) for row in inputs])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 16, 61, 70):
        assert torch.equal(linear(inputs[:count]), alone[:count])


@HALF
def test_panels_have_eight_weights_of_each_of_eight_outputs_and_then_the_next(dtype: torch.dtype) -> None:
    weight = torch.arange(10 * 16).view(10, 16).to(dtype)
    panels = panelled(weight).view(2, 2, 8, 8)
    assert torch.equal(panels[0, 1, 3], weight[3, 8:])
    assert torch.equal(panels[1, 0, :2], weight[8:, :8])
    assert not panels[1, :, 2:].any()


def test_panels_are_apart_and_one_that_is_longer_than_a_chunk_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_rooms", panels._Rooms())
    monkeypatch.setattr(panels, "_CHUNK", 4096)
    made = [
        (float(number), panelled(torch.full((8, wide), float(number)))) for number, wide in enumerate([8, 256, 24, 8])
    ]
    for number, its in made:
        assert (its == number).all()
        assert its.data_ptr() % 64 == 0


class Cached:
    """Keys and values of some sequences in pages that lie anywhere, and their queries."""

    def __init__(self, shapes: list[tuple[int, int]], page_size: int, dtype: torch.dtype, heads: int = 6) -> None:
        self.dim, self.heads, self.kv_heads, self.page_size, self.dtype = 40, heads, 2, page_size, dtype
        generator = torch.Generator().manual_seed(0)
        needed = [-(-(start + rows) // page_size) for start, rows in shapes]
        order = torch.randperm(sum(needed), generator=generator).numpy()
        self.layer = torch.randn(2 * self.kv_heads, sum(needed) * page_size, self.dim, generator=generator).to(dtype)
        self.pieces, row = [], 0
        for (start, rows), pages in zip(shapes, np.split(order, np.cumsum(needed)[:-1]), strict=True):
            self.pieces.append(Piece(row, rows, start, pages))
            row += rows
        self.query = torch.randn(row, heads, self.dim, generator=generator).to(dtype)

    def attended(self, window: int | None, pieces: list[Piece] | None = None) -> torch.Tensor:
        from outrider.lm.kernels.compiled import Attention

        found = kernels()
        assert found is not None
        batch = RaggedBatch(self.pieces if pieces is None else pieces, 10**6, self.page_size, CPU)
        attention = Attention(batch, self.layer, self.page_size, self.heads, 0.3)
        return found.attend(attention, self.layer, window, self.query)

    def expected(self, window: int | None) -> torch.Tensor:
        """In float64, row by row."""
        output = torch.empty(self.query.shape, dtype=torch.float64)
        group = self.heads // self.kv_heads
        for piece in self.pieces:
            slots = (torch.from_numpy(piece.pages)[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            for row in range(piece.rows):
                last = piece.start + row + 1
                seen = slots[max(0, last - window) if window else 0 : last]
                keys, values = self.layer[:, seen].double().repeat_interleave(group, 0).split(self.heads)
                query = self.query[piece.first_row + row].double()
                weights = (0.3 * (keys @ query[..., None])[..., 0]).softmax(-1)
                output[piece.first_row + row] = (weights[:, None] @ values)[:, 0]
        return output


SHAPES = [(0, 1), (7, 2), (130, 5), (300, 1), (127, 3), (0, 140), (515, 1)]


@HALF
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize(("shapes", "page_size"), [(SHAPES, 16), (SHAPES, 3), ([(515, 1)], 16), ([(300, 5)], 8)])
def test_attention_is_the_softmax_over_the_seen_keys(
    dtype: torch.dtype, window: int | None, shapes: list[tuple[int, int]], page_size: int, two_threads: None
) -> None:
    cached = Cached(shapes, page_size, dtype)
    actual, tolerance = cached.attended(window).double(), TOLERANCE[dtype]
    torch.testing.assert_close(actual, cached.expected(window), rtol=tolerance, atol=tolerance)


@HALF
@pytest.mark.parametrize("window", [None, 200])
def test_attention_of_a_row_is_the_same_in_every_batch(
    dtype: torch.dtype, window: int | None, two_threads: None
) -> None:
    cached = Cached(SHAPES, 16, dtype)
    together = cached.attended(window)
    for piece in cached.pieces:
        for row in {0, piece.rows - 1}:
            pages = piece.pages[: -(-(piece.start + row + 1) // 16)]
            alone = Piece(piece.first_row + row, 1, piece.start + row, pages)
            place = piece.first_row + row
            assert torch.equal(cached.attended(window, [alone])[place], together[place])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head", [0, 2])  # a key's, a value's
def test_what_is_broken_shows_and_stays_where_it_is(value: float, head: int) -> None:
    cached = Cached([(20, 1), (20, 1)], 16, torch.float32)
    slot = int(cached.pieces[0].pages[0]) * 16 + 3
    cached.layer[head, slot] = value
    output = cached.attended(None)
    assert not output[0, : cached.heads // 2].isfinite().any()
    assert output[1].isfinite().all()


def test_masked_keys_may_hold_anything() -> None:
    cached = Cached([(20, 1)], 16, torch.float32)
    expected = cached.attended(5).clone()
    slots = cached.pieces[0].pages[:1] * 16 + np.arange(16)
    cached.layer[:, slots] = float("nan")  # before the window
    cached.layer[:, cached.pieces[0].pages[1] * 16 + np.arange(5, 16)] = float("nan")  # behind the sequence
    assert torch.equal(cached.attended(5), expected)


@pytest.mark.parametrize(("branches", "suits"), [(None, True), (Branches(3, np.array([2, 2])), False)])
def test_trees_are_left_to_torch(branches: Branches | None, suits: bool) -> None:
    storage = KvStorage([LayerShape(1, 8, 8, torch.float32, None)], 4, 16, CPU)
    batch = RaggedBatch([Piece(0, 2, 3, np.arange(1), branches)], storage.null_page, 16, CPU)
    assert PagedPass(storage, batch).suits(0, 8) is suits


@pytest.mark.parametrize("architecture", TAKEN)
def test_a_pass_at_once_equals_the_models_own(architecture: str, chosen: None) -> None:
    engine, model = tiny_engine(architecture), own_model(architecture)
    with counted(engine) as passes:
        check_chunks(engine, model, 1e-4)
    assert passes


@pytest.mark.parametrize("architecture", TAKEN)
def test_rows_of_a_pass_are_the_same_in_every_batch(architecture: str, chosen: None, two_threads: None) -> None:
    engine = tiny_engine(architecture, dtype=torch.bfloat16)
    texts = [text(length, length) for length in (40, 3, 25)]
    alone = []
    for tokens in texts:
        sequence = engine.open(tokens[:1])
        alone.append(
            torch.cat([engine.forward([Segment(sequence, tokens[it : it + 1], 1)])[0] for it in range(len(tokens))])
        )
        sequence.free()
    sequences = [engine.open(tokens[:1]) for tokens in texts]
    together = engine.forward([Segment(it, tokens, len(tokens)) for it, tokens in zip(sequences, texts, strict=True)])
    for first, second in zip(alone, together, strict=True):
        assert torch.equal(first, second)


@HALF
@pytest.mark.parametrize("architecture", TAKEN)
def test_states_between_layers_are_shown_and_change_nothing(
    architecture: str, dtype: torch.dtype, chosen: None
) -> None:
    engine, model, words = tiny_engine(architecture, dtype=dtype), own_model(architecture), text(12, 3)
    (plain,) = engine.forward([Segment(engine.open(words[:1]), words, 12)])
    tap, ids = Tap((2, 0, 3, 1), 0), torch.from_numpy(words.astype(np.int64))[None]
    with counted(engine) as passes:
        (rows,) = engine.forward([Segment(engine.open(words[:1]), words, 12, tap=tap)])
    assert len(passes) == 1
    assert torch.equal(rows, plain)
    own = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([own[layer][0] for layer in (2, 0, 3, 1)], -1)
    error = (tap.states().float() - expected).norm() / expected.norm()
    assert float(error) < (5e-3 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("architecture", TAKEN)
def test_rows_of_a_tree_are_the_models_own(
    architecture: str, dtype: torch.dtype, tolerance: float, chosen: None
) -> None:
    """Beside a chain: products go through the kernels and attention through torch. Then a path is kept, and rows that
    follow go through all layers at once over the keys and values that were moved."""
    engine, model = tiny_engine(architecture, dtype=dtype), own_model(architecture)
    prefix, other, tokens = text(21, 1), text(9, 2), text(7, 3)
    parents = np.array([20, 20, 20, 21, 21, 23, 25])
    sequences = [engine.open(prefix[:1]), engine.open(other[:1])]
    with counted(engine) as passes:
        for part in (prefix[:10], prefix[10:20]):
            engine.forward([Segment(sequences[0], part, 0)])
        assert passes == [10, 10]
        new = np.append(prefix[-1:], tokens)
        tree = Segment(sequences[0], new, 8, np.append(19, parents))
        rows, chain = engine.forward([tree, Segment(sequences[1], other, 9)])
        assert passes == [10, 10]
    close(rows[1:], expect(model, prefix, 21, tokens, parents), tolerance)
    close(rows[:1], own_logits(model, prefix)[-1:], tolerance)
    close(chain, own_logits(model, other), tolerance)
    sequences[0].keep([21, 24])
    whole = np.concatenate([prefix, tokens[[0, 3]], text(3, 4)]).astype(np.int32)
    close(engine.forward([Segment(sequences[0], whole[-3:], 3)])[0], own_logits(model, whole)[-3:], tolerance)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Within this part of the largest logit."""
    assert (actual.float() - expected).abs().max() < tolerance * expected.abs().max()


class counted:
    """The passes that went through all layers at once."""

    def __init__(self, engine: CausalLm) -> None:
        self._decoder: Any = engine._run

    def __enter__(self) -> list[int]:
        passes: list[int] = []
        inner = self._decoder._at_once

        def at_once(*arguments: Any) -> torch.Tensor:
            passes.append(len(arguments[1]))
            result: torch.Tensor = inner(*arguments)
            return result

        self._decoder._at_once = at_once
        return passes

    def __exit__(self, *_: object) -> None:
        del self._decoder._at_once


def check_chunks(engine: CausalLm, model: Any, tolerance: float) -> None:
    """Two sequences in passes of 1 to 9 positions."""
    texts = [text(31, 1), text(20, 2)]
    sequences = [engine.open(it[:1]) for it in texts]
    rows: list[list[torch.Tensor]] = [[], []]
    for count in (9, 1, 5, 2, 3):
        segments = [
            Segment(sequence, tokens[sequence.length : sequence.length + count], count)
            for sequence, tokens in zip(sequences, texts, strict=True)
        ]
        for kept, logits in zip(rows, engine.forward(segments), strict=True):
            kept.append(logits)
    for kept, tokens in zip(rows, texts, strict=True):
        torch.testing.assert_close(torch.cat(kept), own_logits(model, tokens)[:20], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("packed_there", "kernels_there", "warns"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_slow_products_are_told(
    packed_there: int,
    kernels_there: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(load, "has_packed", lambda _dtype: bool(packed_there))
    monkeypatch.setattr(load, "kernels", lambda: kernels() if kernels_there else None)
    tiny_engine("llama", dtype=torch.bfloat16)
    assert ("outrider[cpu]" in caplog.text) is warns


@pytest.mark.parametrize("value", ["0", "off"])
def test_kernels_can_be_turned_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(package.SWITCH, value)
    assert kernels.__wrapped__() is None


def test_without_numba_torch_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert kernels.__wrapped__() is None


def test_a_processor_without_what_they_need_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_flags", lambda: {"sse2"})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert kernels.__wrapped__() is None
