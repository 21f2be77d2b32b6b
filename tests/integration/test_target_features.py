"""Features from the target: asked for, they are those of the committed tokens and of what may be accepted."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.lm.synthetic import SyntheticEngine
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import features_from_message, sample_from_message, to_bytes
from outrider.v1 import target_pb2
from outrider.v1.target_pb2 import ROW_FORMAT_LOGITS, ROW_FORMAT_SAMPLE, ROW_FORMAT_SUPPORT
from tests.harness.engines_lm import own_model, served_tiny_engine
from tests.harness.workers import error_of, int32, reason, start_target
from tests.integration.test_target_rows import compact_item
from tests.integration.test_target_trees import random_block, tree_item

LAYERS, HIDDEN = (3, 1), 32
WIDTH = len(LAYERS) * HIDDEN


@torch.inference_mode()
def own_states(tokens: list[int]) -> torch.Tensor:
    ids = torch.from_numpy(np.array(tokens, np.int64))[None]
    states = own_model("llama")(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], -1)


def asking(item: target_pb2.VerifyItem, start: int) -> target_pb2.VerifyItem:
    item.feature_layers.extend(LAYERS)
    item.feature_start = start
    return item


def states_of(result: target_pb2.VerifyResult, start: int) -> torch.Tensor:
    assert result.status.code == 0, result.status
    assert result.features.start == start
    return features_from_message(result.features, WIDTH)


def assert_like(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().mean()))


@pytest.mark.parametrize("row_format", [ROW_FORMAT_LOGITS, ROW_FORMAT_SUPPORT])
async def test_they_cover_the_prompt_and_the_block(row_format: Any) -> None:
    async with start_target(served_tiny_engine("llama"), token_budget=7) as target:
        info = await target.info()
        assert (info.hidden_size, info.layers) == (HIDDEN, 3)
        tokens, draft = [1, 5, 9, 2, 7, 7, 3, 4, 8, 6, 1], [4, 2, 9]
        item = asking(compact_item("s", tokens, draft, row_format), 0)
        plain = compact_item("t", tokens, draft, row_format)
        result, without = await target.verify(item, plain)
        assert_like(states_of(result, 0), own_states(tokens + draft))
        assert not without.HasField("features")
        assert result.WhichOneof("rows") == without.WhichOneof("rows")
        committed = [*tokens, 4, 11]
        item = asking(compact_item("s", committed, draft, row_format, law=None, new=2), len(committed) - 1)
        (result,) = await target.verify(item)
        assert result.timing.computed_tokens == 4
        assert_like(states_of(result, 12), own_states(committed + draft)[12:])


async def test_of_a_chain_whose_draws_are_known_only_what_is_accepted_travels() -> None:
    async with start_target(served_tiny_engine("llama")) as target:
        tokens = [1, 5, 9, 2]
        (first,) = await target.verify(compact_item("s", tokens, [1, 1, 1], ROW_FORMAT_SAMPLE))
        own = int(sample_from_message(first.sample, 3, 61)[0])
        item = asking(compact_item("s", tokens, [own, 60, 60], ROW_FORMAT_SAMPLE, law=None, new=1), 3)
        (result,) = await target.verify(item)
        drawn = sample_from_message(result.sample, 3, 61).tolist()
        accepted = next(index for index in range(4) if index == 3 or drawn[index] != [own, 60, 60][index])
        assert accepted >= 1
        assert_like(states_of(result, 3), own_states([*tokens, own, 60, 60])[3 : 4 + accepted])


async def test_of_a_tree_all_travel_in_the_blocks_order() -> None:
    async with start_target(served_tiny_engine("llama")) as target:
        block = random_block(5)
        tokens, shape, _ = block
        committed = [1, 2, 3, 4, 5]
        (result,) = await target.verify(asking(tree_item("s", committed, block, ROW_FORMAT_SAMPLE), 0))
        states = states_of(result, 0)
        assert len(states) == 5 + len(tokens)
        assert_like(states[:5], own_states(committed))
        for token in range(len(tokens)):
            path = [tokens[it] for it in shape.path(token + 1)]
            assert_like(states[5 + token], own_states(committed + path)[-1])


async def test_what_was_lost_is_computed_again_and_no_neighbour_waits_for_a_cache() -> None:
    """Though the session, and another with the same prompt, are cached."""
    async with start_target(served_tiny_engine("llama")) as target:
        tokens = [int(token) for token in np.random.default_rng(2).integers(0, 61, 40)]
        await target.verify(compact_item("s", tokens, [], ROW_FORMAT_SAMPLE))
        item = asking(compact_item("s", tokens, [], ROW_FORMAT_SAMPLE, law=None, new=1), 25)
        (again,) = await target.verify(item)
        assert again.timing.computed_tokens == 15
        assert_like(states_of(again, 25), own_states(tokens)[25:])
        (opened,) = await target.verify(asking(compact_item("t", tokens, [], ROW_FORMAT_SAMPLE), 0))
        assert opened.timing.computed_tokens == 40
        assert_like(states_of(opened, 0), own_states(tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_layers": [4]}, "feature_layers is [4], limit 4 in [0, 3]"),
        ({"feature_layers": [0, 1, 2, 3, 3]}, "feature_layers is [0, 1, 2, 3, 3], limit 4 in [0, 3]"),
        ({"feature_layers": [1], "feature_start": 3}, "feature_start is 3, must be less than base_length 3"),
    ],
)
async def test_what_cannot_be_given_is_refused_and_harms_nobody(fields: dict[str, Any], message: str) -> None:
    async with start_target(served_tiny_engine("llama")) as target:
        item = compact_item("s", [1, 2, 3], [], ROW_FORMAT_SAMPLE)
        for name, value in fields.items():
            item.feature_layers.extend(value) if name == "feature_layers" else setattr(item, name, value)
        bad, good = await target.verify(item, compact_item("t", [1, 2, 3], [], ROW_FORMAT_SAMPLE))
        assert error_of(bad).reason == reason("INVALID_FIELD")
        assert message in error_of(bad).message
        assert good.status.code == 0


async def test_more_bytes_than_an_answer_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_service.job.MAX_FEATURE_BYTES", 3 * 2 * HIDDEN)
    async with start_target(served_tiny_engine("llama")) as target:
        item = compact_item("s", [1, 2, 3], [5], ROW_FORMAT_SAMPLE)
        item.feature_layers.append(3)
        (result,) = await target.verify(item)
        assert "feature_start asks for 256 bytes of features, limit 192" in error_of(result).message
        item.feature_start = 1
        (result,) = await target.verify(item)
        assert result.status.code == 0


async def test_a_model_without_features_says_so() -> None:

    async with start_target(SyntheticEngine(SyntheticSpec(vocab_size=13))) as target:
        info = await target.info()
        assert (info.hidden_size, info.layers) == (0, 0)
        item = asking(compact_item("s", [1, 2, 3], [], ROW_FORMAT_SAMPLE), 0)
        (result,) = await target.verify(item)
        assert "this model shows no features" in error_of(result).message
        item = compact_item("t", [1, 2, 3], [], ROW_FORMAT_SAMPLE)
        item.draft_tokens = to_bytes(int32([1]))
        assert (await target.verify(item))[0].status.code == 0
