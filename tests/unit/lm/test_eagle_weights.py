"""EAGLE heads are read from the layouts in which they are published, and nothing else is taken for one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.lm.eagle_weights import CONFIG, PICKLED, WEIGHTS, EagleWeights
from outrider.lm.engine import ModelRefused
from tests.harness.eagle import DIM, HEADS, KEPT, SIZE, random_eagle1, random_eagle3, settings, write
from tests.harness.models import VOCAB

LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("pickled", [False, True])
def test_the_first_kind_as_published(tmp_path: Path, pickled: bool) -> None:
    embeddings = {"embed_tokens.weight": torch.ones(VOCAB, SIZE)}
    tensors = random_eagle1() | embeddings
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    found = EagleWeights.load(write(tmp_path, tensors | frequencies, settings(), pickled=pickled))
    assert (found.config.kind, found.kept, found.config.layers_of(30)) == (1, None, (30,))
    llama = found.config.llama
    assert (llama.hidden_size, llama.head_dim, llama.rms_norm_eps) == (SIZE, DIM, 1e-5)
    assert dict(llama.rope_parameters or {})["rope_theta"] == 500000.0
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)


def test_the_third_kind_as_published(tmp_path: Path) -> None:
    tensors = random_eagle3()
    found = EagleWeights.load(write(tmp_path, tensors, settings(draft_vocab_size=len(KEPT)), pickled=True))
    assert found.config.kind == 3
    # As the public code does without a word about it: the inputs of layers 2, n / 2 and n - 3.
    assert found.config.layers_of(30) == (2, 15, 27)
    assert found.kept is not None
    assert torch.equal(found.kept, KEPT)
    assert found.tensors.keys() == tensors.keys() - {"d2t", "t2d"}


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({LAYERS: [2, 15, 27]}, (2, 15, 27)),
        # Nested it counts outputs of layers from 0: the same layers as above.
        ({"eagle_config": {LAYERS: [1, 14, 26], "use_aux_hidden_state": True}}, (2, 15, 27)),
        ({LAYERS: [0, 3], "eagle_config": {LAYERS: [5, 6]}}, (0, 3)),
    ],
)
def test_the_layers_that_feed_it_are_counted_as_features_are(
    tmp_path: Path, said: dict[str, Any], layers: tuple[int, ...]
) -> None:
    found = EagleWeights.load(write(tmp_path, random_eagle3(fed=len(layers)), settings(**said)))
    assert found.config.layers == layers
    assert found.config.layers_of(30) == layers


def test_other_spellings(tmp_path: Path) -> None:
    first, third = random_eagle1(bias=False), random_eagle3()
    layer = settings()
    speculators = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): it for name, it in first.items()
    }
    found = EagleWeights.load(write(tmp_path / "1", speculators, {"transformer_layer_config": layer}))
    assert found.tensors.keys() == first.keys()
    renamed = {f"model.{name}".replace("midlayer.", "layers.0."): it for name, it in third.items() if "2" not in name}
    renamed |= {"d2t": third["d2t"], "t2d": third["t2d"]}
    nested = {"transformer_layer_config": layer, "draft_vocab_size": len(KEPT), LAYERS: [2, 1, 0]}
    found = EagleWeights.load(write(tmp_path / "3", renamed, nested))
    assert found.tensors.keys() == third.keys() - {"d2t", "t2d"}
    assert found.config.layers == (2, 1, 0)
    assert found.config.norm_before_residual
    plain = EagleWeights.load(write(tmp_path / "4", third, settings()))
    assert not plain.config.norm_before_residual


def test_biases_are_all_there_or_none(tmp_path: Path) -> None:
    tensors = random_eagle1() | {"layers.0.self_attn.q_proj.bias": torch.ones(HEADS * DIM)}
    found = EagleWeights.load(write(tmp_path, tensors, settings(qkv_bias=True)))
    assert found.config.llama.attention_bias
    assert found.tensors["layers.0.self_attn.q_proj.bias"].tolist() == [1.0] * HEADS * DIM
    assert found.tensors["layers.0.self_attn.o_proj.bias"].tolist() == [0.0] * SIZE
    none = EagleWeights.load(write(tmp_path / "none", random_eagle1(), settings(attention_bias=True)))
    assert not none.config.llama.attention_bias


@pytest.mark.parametrize("kind", [1, 3])
def test_what_is_saved_is_loaded(tmp_path: Path, kind: int) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 128}
    tensors = random_eagle1() if kind == 1 else random_eagle3(fed=2)
    more = settings(rope_scaling=rope, norm_before_residual=True, **({} if kind == 1 else {LAYERS: [1, 3]}))
    first = EagleWeights.load(write(tmp_path / "public", tensors, more))
    first.save(tmp_path / "saved", "some/target")
    second = EagleWeights.load(tmp_path / "saved")
    for name in ("kind", "layers", "target_size", "norm_before_residual"):
        assert getattr(first.config, name) == getattr(second.config, name)
    assert first.config.llama.to_dict() == second.config.llama.to_dict()
    assert dict(second.config.llama.rope_parameters or {})["factor"] == 8.0
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(second.tensors[name], it) for name, it in first.tensors.items())
    if kind == 3:
        assert first.kept is not None
        assert second.kept is not None
        assert torch.equal(first.kept, second.kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"num_key_value_heads": 3}, "4 heads, 3 of keys"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": "linear"}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' are not known"),
        ({"rope_scaling": {"rope_type": "other"}}, "'other' are not known"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "other"}, "hidden_act 'other'"),
        ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_before_residual": 1}, "norm_before_residual 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "without layers of the target"),
        ({"eagle_config": [3]}, "holds no EAGLE head"),
        ({LAYERS: ["x"]}, f"{LAYERS} is 'x'"),
        ({LAYERS: 3}, "holds no EAGLE head"),
        ({LAYERS: [-1]}, LAYERS),
        ({LAYERS: [1] * 17}, LAYERS),
        ({LAYERS: [1, 2]}, "fc.weight is torch.float32 [32, 96], not [32, 64]"),
        ({"target_hidden_size": 64}, "fc.weight"),
        ({"target_hidden_size": "x"}, "target_hidden_size"),
        ({"transformer_layer_config": 3}, "holds no EAGLE head"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    refused(write(tmp_path, random_eagle3(), settings(**change)), message)


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ModelRefused, match="holds no EAGLE head") as failure:
        EagleWeights.load(directory)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


OFFSETS = KEPT - torch.arange(len(KEPT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": OFFSETS.flip(0)}, "ascending"),
        ({"d2t": OFFSETS + VOCAB}, "ascending"),
        ({"d2t": OFFSETS.float()}, "d2t is torch.float32"),
        ({"d2t": OFFSETS[:0]}, "0 elements"),
        ({"d2t": OFFSETS + 1}, "d2t and t2d"),
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"lm_head.weight": torch.zeros(3, SIZE)}, "lm_head.weight is torch.float32 [3, 32], not [8, 32]"),
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"norm.weight": torch.ones(SIZE, dtype=torch.int64)}, "norm.weight is torch.int64"),
        ({"fc.bias": torch.zeros(SIZE)}, "fc.bias is not known"),
        ({"midlayer.mlp.extra.weight": torch.zeros(1)}, "midlayer.mlp.extra.weight is not known"),
        ({"layers.0.mlp.up_proj.weight": torch.zeros(48, SIZE)}, "two tensors midlayer.mlp.up_proj"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(48, SIZE)}, "layers.1.mlp"),
    ],
)
def test_weights_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: tensor for name, tensor in (random_eagle3() | change).items() if tensor is not None}
    refused(write(tmp_path, tensors, settings()), message)


def test_a_state_of_another_size_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    tensors = random_eagle3() | {"fc.weight": torch.zeros(SIZE, 3 * 64)}
    refused(write(tmp_path / "without", tensors, settings(target_hidden_size=64)), "embed_tokens.weight is missing")
    tensors |= {"embed_tokens.weight": torch.zeros(VOCAB, SIZE)}
    found = EagleWeights.load(write(tmp_path / "with", tensors, settings(target_hidden_size=64)))
    assert found.config.target_size == 64


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "No such file")
    write(tmp_path, random_eagle1(), settings())
    (tmp_path / CONFIG).write_text("[" * 100_000)
    refused(tmp_path, "holds no EAGLE head")
    (tmp_path / CONFIG).write_text("[]")
    refused(tmp_path, "holds no EAGLE head")
    write(tmp_path, random_eagle1(), settings())
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    refused(tmp_path, "holds no EAGLE head")
    (tmp_path / WEIGHTS).unlink()
    torch.save([torch.zeros(1)], tmp_path / PICKLED)
    refused(tmp_path, "no tensors by name")
    (tmp_path / PICKLED).write_bytes(b"nothing")
    refused(tmp_path, "cannot be read")
    torch.save({"fc.weight": Path("code")}, tmp_path / PICKLED)  # needs code to be read
    refused(tmp_path, "cannot be read")
