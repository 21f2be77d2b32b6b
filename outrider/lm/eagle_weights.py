"""EAGLE heads as they are published: a decoder layer that is fed by the target's states and says the next token.

Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty" (kind 1; EAGLE-2 has the same
weights), and Li et al. 2025, "EAGLE-3: scaling up inference acceleration of large language models via training-time
test" (kind 3). A directory holds `config.json` (`outrider.lm.eagle_config`) and `model.safetensors` or
`pytorch_model.bin`. With h the layer's hidden size the tensors are, by the names that they have here:

    fc.weight                                    kind 1 [h, 2 h] of (embedding, state); kind 3 [h, states side by side]
    fc.bias                                      [h], kind 1, where there is one
    LAYER.self_attn.{q,k,v}_proj.weight          of h inputs, or of 2 h in kind 3: (normed embedding, normed state)
    LAYER.self_attn.o_proj.weight
    LAYER.self_attn.{q,k,v,o}_proj.bias          all or none
    LAYER.mlp.{gate,up,down}_proj.weight
    LAYER.post_attention_layernorm.weight        [h]
    LAYER.{input_layernorm,hidden_norm}.weight   [h], kind 3: of the embedding and of the state
    norm.weight                                  [h], kind 3: before the head
    lm_head.weight                               [head rows, h]; without it the target's rows
    embed_tokens.weight                          [target vocabulary, h]; without it the target's

LAYER is `layers.0` in kind 1 and `midlayer` in kind 3.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.lm.eagle_config import EagleConfig, parse_config
from outrider.lm.engine import ModelRefused

WEIGHTS, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
# Other spellings of a name's beginning, the first that fits.
_SPELLINGS = (("fusion_fc.", "fc."), ("transformer.", "layers.0."), ("midlayer.", "layers.0."))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class EagleWeights:
    """What the directory holds.

    Attributes:
        tensors: float, by the names above.
        kept: [n] int64, ascending: the tokens that the rows of its own head stand for; None: all of the target's.
    """

    config: EagleConfig
    tensors: dict[str, torch.Tensor] = field(repr=False)
    kept: torch.Tensor | None = field(default=None, repr=False)

    @staticmethod
    def load(directory: Path) -> "EagleWeights":
        """Raises ModelRefused with one sentence when the directory holds no such head."""
        try:
            settings = json.loads((directory / CONFIG).read_text())
            named = _read(directory)
            kind = 3 if any(name.endswith("hidden_norm.weight") for name in named) else 1
            config = parse_config(settings, kind)
            kept = _kept(named, config.llama.vocab_size)
            tensors = _renamed(named, kind)
            _fill_biases(tensors, config)
            _check(tensors, config, None if kept is None else len(kept))
            return EagleWeights(config, tensors, kept)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise ModelRefused(f"{directory} holds no EAGLE head: {error}") from error
        except RuntimeError as error:  # torch's reader
            raise ModelRefused(f"{directory} holds no EAGLE head: {str(error).splitlines()[0]}") from error

    def save(self, directory: Path, base: str) -> None:
        """Writes the public layout; `base` is the MODEL that it was made for."""
        directory.mkdir(parents=True, exist_ok=True)
        named, extra = dict(self.tensors), {"base_model_name_or_path": base, "bias": "fc.bias" in self.tensors}
        if self.kept is not None:
            known = torch.zeros(self.config.llama.vocab_size, dtype=torch.bool)
            known[self.kept] = True
            named |= {"d2t": self.kept - torch.arange(len(self.kept)), "t2d": known}
            extra["draft_vocab_size"] = len(self.kept)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, directory / WEIGHTS)
        (directory / CONFIG).write_text(json.dumps(self.config.as_json() | extra, indent=2) + "\n")


def expected_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Of each tensor that must be there."""
    llama, third = config.llama, config.kind == 3
    size, inner = llama.hidden_size, llama.intermediate_size
    dim: int = llama.head_dim or size // llama.num_attention_heads
    heads, pairs = llama.num_attention_heads * dim, (llama.num_key_value_heads or llama.num_attention_heads) * dim
    seen = 2 * size if third else size
    layer = layer_name(config.kind)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, config.fed * config.target_size if third else 2 * size),
        f"{layer}.self_attn.q_proj.weight": (heads, seen),
        f"{layer}.self_attn.k_proj.weight": (pairs, seen),
        f"{layer}.self_attn.v_proj.weight": (pairs, seen),
        f"{layer}.self_attn.o_proj.weight": (size, heads),
        f"{layer}.mlp.gate_proj.weight": (inner, size),
        f"{layer}.mlp.up_proj.weight": (inner, size),
        f"{layer}.mlp.down_proj.weight": (size, inner),
        f"{layer}.post_attention_layernorm.weight": (size,),
    }
    if third:
        norms = (f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight")
        shapes |= dict.fromkeys(norms, (size,))
    return shapes


def layer_name(kind: int) -> str:
    """What its layer is called."""
    return "midlayer" if kind == 3 else "layers.0"


def _read(directory: Path) -> dict[str, torch.Tensor]:
    if (directory / WEIGHTS).exists():
        tensors = load_file(directory / WEIGHTS)
    else:
        try:
            tensors = torch.load(directory / PICKLED, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # whatever reading a pickle raises
            raise ValueError(f"{PICKLED} cannot be read: {(str(error).splitlines() or [''])[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(it, torch.Tensor) for it in tensors.values()):
        raise ValueError("its weights are no tensors by name")
    # Frequencies are made from the configuration.
    return {str(name): tensor for name, tensor in tensors.items() if not str(name).endswith("rotary_emb.inv_freq")}


def _renamed(named: dict[str, torch.Tensor], kind: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in named.items():
        plain = name.removeprefix("model.")
        for other, ours in _SPELLINGS:
            plain = ours + plain.removeprefix(other) if plain.startswith(other) else plain
        if kind == 3 and plain.startswith("layers.0."):
            plain = f"{layer_name(3)}.{plain.removeprefix('layers.0.')}"
        if plain in tensors:
            raise ValueError(f"it has two tensors {plain:.60}")
        tensors[plain] = tensor
    return tensors


def _kept(named: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor | None:
    """Takes the mapping of its vocabulary out of the tensors."""
    offsets, known = named.pop("d2t", None), named.pop("t2d", None)
    if offsets is None:
        return None
    if offsets.ndim != 1 or offsets.is_floating_point() or not 0 < len(offsets) <= vocab_size:
        raise ValueError(f"d2t is {offsets.dtype} of {offsets.ndim} dimensions and {offsets.numel()} elements")
    kept = offsets.long() + torch.arange(len(offsets))
    if kept[0] < 0 or kept[-1] >= vocab_size or bool((kept.diff() <= 0).any()):
        raise ValueError(f"d2t does not lead to ascending tokens of {vocab_size}")
    if known is not None and known.bool().flatten().nonzero().flatten().tolist() != kept.tolist():
        raise ValueError("d2t and t2d speak of other tokens")
    return kept


def _fill_biases(tensors: dict[str, torch.Tensor], config: EagleConfig) -> None:
    """Some have biases in queries, keys and values alone: all or none here."""
    layer, shapes = layer_name(config.kind), expected_shapes(config)
    names = [f"{layer}.self_attn.{part}_proj" for part in "qkvo"]
    if any(f"{name}.bias" in tensors for name in names):
        config.llama.attention_bias = True
        for name in names:
            tensors.setdefault(f"{name}.bias", torch.zeros(shapes[f"{name}.weight"][0]))


def _check(tensors: dict[str, torch.Tensor], config: EagleConfig, kept: int | None) -> None:
    """Raises ValueError or KeyError with the first difference."""
    size, vocabulary = config.llama.hidden_size, config.llama.vocab_size
    shapes = expected_shapes(config)
    allowed = {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if "self_attn" in name}
    allowed |= {"lm_head.weight": (kept or vocabulary, size), "embed_tokens.weight": (vocabulary, size)}
    allowed |= {"fc.bias": (size,)} if config.kind == 1 else {}
    for name, tensor in tensors.items():
        if name not in shapes | allowed:
            raise ValueError(f"its tensor {name:.60} is not known")
        if tensor.dtype not in _FLOATS or tuple(tensor.shape) != (shapes | allowed)[name]:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {list((shapes | allowed)[name])}")
    if missing := sorted(shapes.keys() - tensors):
        raise ValueError(f"{missing[0]} is missing")
    if kept is not None and "lm_head.weight" not in tensors:
        raise ValueError("lm_head.weight is missing, of which d2t speaks")
    if config.target_size != size and "embed_tokens.weight" not in tensors:
        raise ValueError(f"embed_tokens.weight is missing, and the target's states have {config.target_size} elements")
