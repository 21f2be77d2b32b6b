"""EAGLE heads for tests: random weights in the public layout, spelled as they are published."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from outrider.law.sparse import Int32Array
from outrider.lm.eagle import EagleEngine
from outrider.lm.eagle_head import EagleHead
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import EngineInfo, Segment
from outrider.lm.features import FeatureWindow
from tests.harness.engines_lm import assert_same
from tests.harness.models import VOCAB

SIZE, INNER, HEADS, PAIRS, DIM = 32, 48, 4, 2, 8
KEPT = torch.tensor([1, 2, 5, 8, 13, 21, 34, 55])


def settings(**changes: object) -> dict[str, Any]:
    """A `config.json` as published for either kind."""
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": PAIRS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": VOCAB,
    }
    return {name: value for name, value in (plain | changes).items() if value != "absent"}


def random_eagle1(*, seed: int = 3, bias: bool = True) -> dict[str, torch.Tensor]:
    """By the published names of EAGLE-1 and EAGLE-2."""
    shapes = _layer("layers.0.", SIZE) | {"fc.weight": (SIZE, 2 * SIZE)} | ({"fc.bias": (SIZE,)} if bias else {})
    return _random(shapes, seed)


def random_eagle3(*, seed: int = 3, fed: int = 3) -> dict[str, torch.Tensor]:
    """By the published names of EAGLE-3, with a vocabulary of KEPT."""
    shapes = _layer("midlayer.", 2 * SIZE) | {"fc.weight": (SIZE, fed * SIZE), "norm.weight": (SIZE,)}
    shapes |= {"midlayer.input_layernorm.weight": (SIZE,), "midlayer.hidden_norm.weight": (SIZE,)}
    tensors = _random(shapes | {"lm_head.weight": (len(KEPT), SIZE)}, seed)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[KEPT] = True
    return tensors | {"d2t": KEPT - torch.arange(len(KEPT)), "t2d": known}


def write(directory: Path, tensors: dict[str, torch.Tensor], config: object, *, pickled: bool = False) -> Path:
    """The directory, with both files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def _layer(prefix: str, seen: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, seen),
        f"{prefix}self_attn.k_proj.weight": (PAIRS * DIM, seen),
        f"{prefix}self_attn.v_proj.weight": (PAIRS * DIM, seen),
        f"{prefix}self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.up_proj.weight": (INNER, SIZE),
        f"{prefix}mlp.down_proj.weight": (SIZE, INNER),
        f"{prefix}post_attention_layernorm.weight": (SIZE,),
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / 4 + ("norm" in name) for name, shape in sorted(shapes.items())
    }


def said_by_formula(
    tensors: dict[str, torch.Tensor],
    words: torch.Tensor,
    target_rows: torch.Tensor,
    text: Sequence[int],
    states: dict[int, torch.Tensor],
    first: int = 1,
    *,
    normed: bool = False,
) -> torch.Tensor:
    """[text - first, VOCAB]: what a head says after each token from position `first` on, one token at a time, float32.

    EAGLE section 4.1, EAGLE-3 section 3.1, as the public code does it. Tokens that the head does not know score -1e30.

    Args:
        words: [VOCAB, SIZE], the target's embeddings.
        target_rows: [VOCAB, SIZE], its output matrix.
        states: of the target after the tokens at these positions, side by side; the head's own output elsewhere.
        normed: whether the residual stream begins with the normed state (speculators).
    """
    third, keys, values, rows = "norm.weight" in tensors, list[torch.Tensor](), list[torch.Tensor](), []
    layer = {name.split(".", 1 if third else 2)[-1]: it for name, it in tensors.items() if "layer" in name}
    output = torch.empty(0)
    for position in range(first, len(text)):
        word = words[text[position]]
        if third:
            state = tensors["fc.weight"] @ states[position - 1] if position - 1 in states else output
            below = _rms(state, layer["hidden_norm.weight"])
            state, inputs = below if normed else state, torch.cat([_rms(word, layer["input_layernorm.weight"]), below])
        else:
            state = states.get(position - 1, output)
            inputs = state = tensors["fc.weight"] @ torch.cat([word, state]) + tensors.get("fc.bias", torch.zeros(SIZE))
        query, key, value = ((layer[f"self_attn.{it}_proj.weight"] @ inputs).view(-1, DIM) for it in "qkv")
        query, key = _turned(query, position), _turned(key, position)
        keys.append(key), values.append(value)
        seen = []
        for head in range(HEADS):
            pair = head * PAIRS // HEADS
            scores = torch.stack([it[pair] @ query[head] for it in keys]) / DIM**0.5
            seen.append(scores.softmax(0) @ torch.stack([it[pair] for it in values]))
        state = state + layer["self_attn.o_proj.weight"] @ torch.cat(seen)
        inner = _rms(state, layer["post_attention_layernorm.weight"])
        gate, up = layer["mlp.gate_proj.weight"] @ inner, layer["mlp.up_proj.weight"] @ inner
        output = state + layer["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        rows.append(_logits(tensors, _rms(output, tensors["norm.weight"]) if third else output, target_rows))
    return torch.stack(rows)


def _logits(tensors: dict[str, torch.Tensor], output: torch.Tensor, target_rows: torch.Tensor) -> torch.Tensor:
    scores = tensors.get("lm_head.weight", target_rows) @ output
    if "d2t" not in tensors:
        return scores
    everywhere = torch.full((VOCAB,), -1e30)
    for index, offset in enumerate(tensors["d2t"].tolist()):
        everywhere[index + offset] = scores[index]
    return everywhere


def _rms(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * state / (state.square().mean() + 1e-5).sqrt()


def _turned(heads: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embeddings of [heads, DIM]."""
    angles = position / 500000.0 ** (torch.arange(DIM // 2) * 2 / DIM)
    near, far = heads.chunk(2, -1)
    return torch.cat([near * angles.cos() - far * angles.sin(), far * angles.cos() + near * angles.sin()], -1)


# "normed" as the speculators library makes them.
KINDS = ("1", "3", "3 normed")
# Of the targets that heads are for in tests.
LAYERS = 3


def loaded(kind: str) -> tuple[dict[str, torch.Tensor], EagleWeights]:
    """A random head as its file has it, and as it is read."""
    # Weaker where nothing is normed: states that grow from token to token make every rounding error large.
    tensors = {name: it / 2 for name, it in random_eagle1().items()} if kind == "1" else random_eagle3()
    with TemporaryDirectory() as directory:
        config = settings(norm_before_residual=kind == "3 normed", draft_vocab_size=len(KEPT))
        return tensors, EagleWeights.load(write(Path(directory), tensors, config))


def target_ends() -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and output matrix of a target, [VOCAB, SIZE] each."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(VOCAB, SIZE, generator=generator), torch.randn(VOCAB, SIZE, generator=generator)


def eagle_engine(kind: str, *, pages: int = 120, ends: tuple[torch.Tensor, torch.Tensor] | None = None) -> EagleEngine:
    """Over `loaded` and the ends of a target, `target_ends` where none are given, with pages of 4 tokens."""
    _, weights = loaded(kind)
    words, rows = ends or target_ends()
    head = nn.Linear(SIZE, VOCAB, bias=False)
    head.weight = nn.Parameter(rows, requires_grad=False)
    info = EngineInfo("eagle", VOCAB, VOCAB, min(200, 4 * pages), "float32", (), "")
    made = EagleHead(weights, words, head, pack=True)
    return EagleEngine(made, info, weights.config.layers_of(LAYERS), SIZE, pages=pages, page_size=4)


def assert_says(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """As `assert_same`, of the tokens that the head knows; all others are left out of both."""
    scored = expected > -1e29
    assert torch.equal(actual > -1e29, scored)
    assert_same(actual[scored], expected[scored])


class Played:
    """One session: its text, the target's states of it, and what formulas say of both.

    Attributes:
        text: committed tokens, then a chain of drafted ones.
        known: how many tokens are committed; the target's states of all but the last of them are known.
        since: position of the first state that the engine is fed with.
        first_entry: position of the first entry that it then has.
    """

    def __init__(self, engine: EagleEngine, kind: str, text: Int32Array, *, known: int, since: int = 0) -> None:
        self.engine, self.text, self.known = engine, text.tolist(), known
        self.since, self.first_entry = since, since + 1
        self.sequence = engine.open(text)
        self._tensors, _ = loaded(kind)
        self._normed = kind == "3 normed"
        width = engine.info.feeding.width if engine.info.feeding is not None else 0
        self._states = torch.randn(300, width, generator=torch.Generator().manual_seed(len(text))).bfloat16()
        self._tree: list[tuple[int, int]] = []

    def fed(self) -> FeatureWindow:
        made = FeatureWindow(300)
        made.take(self.since, self._states[self.since : self.known - 1])
        return made

    def first(self) -> Segment:
        """All that the sequence lacks, with as many rows as there are entries."""
        start = self.sequence.length
        tokens = np.array(self.text[start:], np.int32)
        rows = len(self.text) - max(start, self.first_entry)
        return Segment(self.sequence, tokens, rows, fed=self.fed())

    def prefill(self) -> None:
        (rows,) = self.engine.forward([self.first()])
        assert_says(rows, self.expected(len(rows)))

    def segment(self, tokens: Sequence[int]) -> Segment:
        return Segment(self.sequence, np.array(tokens, np.int32), len(tokens), fed=self.fed())

    def branching(self, tokens: Sequence[int], parents: Sequence[int]) -> Segment:
        """Parents as numbers of candidates, -1 for the last committed token."""
        following = np.array([self.known + it for it in parents])
        return Segment(self.sequence, np.array(tokens, np.int32), len(tokens), following, fed=self.fed())

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self._tree += zip(tokens, parents, strict=True)

    def commit(self, length: int, more: Sequence[int]) -> None:
        """The text up to `length` is committed, and tokens after it; what was drafted is not to be built on."""
        self.sequence.truncate(min(self.sequence.length, self.known))
        self.text, self._tree = [*self.text[:length], *more], []
        self.known = len(self.text)

    def lose(self, since: int) -> None:
        """The engine's state is gone, and so are the states before a position."""
        self.sequence.free()
        self.sequence = self.engine.open(np.array(self.text, np.int32))
        self.since, self.first_entry = since, since + 1

    def expected(self, count: int) -> torch.Tensor:
        """[count, VOCAB] after the last tokens of the text."""
        return self._said(self.text)[-count:]

    def expected_of_tree(self, count: int) -> torch.Tensor:
        """[count, VOCAB] after the last candidates."""
        return torch.stack([self._said(self._path(it))[-1] for it in range(len(self._tree) - count, len(self._tree))])

    def _path(self, candidate: int) -> list[int]:
        path: list[int] = []
        while candidate >= 0:
            token, candidate = self._tree[candidate]
            path.append(token)
        return [*self.text[: self.known], *path[::-1]]

    def _said(self, text: Sequence[int]) -> torch.Tensor:
        states = {at: self._states[at].float() for at in range(self.first_entry - 1, self.known - 1)}
        words, rows = target_ends()
        return said_by_formula(self._tensors, words, rows, text, states, self.first_entry, normed=self._normed)
