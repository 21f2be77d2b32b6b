"""What an EAGLE head's `config.json` says, in its public spellings.

Plain: a Llama configuration of one layer with `draft_vocab_size`, `target_hidden_size` and, nested in `eagle_config`,
which layers of the target feed it. As the speculators library writes it: the layer in `transformer_layer_config`.

Which layers feed EAGLE-3 is counted in two ways, told apart by where the key stands. `eagle_aux_hidden_state_layer_ids`
at the top counts as `outrider.lm.features` does (0 is the embedding); nested in `eagle_config` it counts layers from 0
and means their outputs, which is one more here. Without the key: 2, half of the layers, all but 3, counted as here.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Frequencies of the others change with the length of the text: what was cached would no longer fit.
_ROPE = {"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"}
_MOST = {
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
}
_OTHERS = ("hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling")
_MOST_LAYERS, _MOST_FED = 1 << 12, 16
# What some variants do and this one does not: extra norms, no target layers, another output.
_UNKNOWN = ("fc_norm", "norm_before_fc", "norm_output", "add_para_norm", "layernorms")


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE head is.

    Attributes:
        kind: 1 (also EAGLE-2, whose weights are the same) or 3.
        llama: of its one decoder layer; its vocabulary is the target's.
        layers: of the target that feed it, as `outrider.lm.features` counts; () where that depends on how many it has.
        target_size: of one of the target's states.
        norm_before_residual: whether EAGLE-3's residual stream begins with the normed state.
    """

    kind: int
    llama: LlamaConfig = field(repr=False)
    layers: tuple[int, ...] = ()
    target_size: int = 0
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if not self.target_size:
            object.__setattr__(self, "target_size", self.llama.hidden_size)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that feed it, of a target of `count`; the last one means the final norm's output."""
        if self.kind == 1:
            return (count,)
        return self.layers or (2, count // 2, count - 3)

    @property
    def fed(self) -> int:
        """How many layers feed it."""
        return 1 if self.kind == 1 else len(self.layers) or 3

    def as_json(self) -> dict[str, Any]:
        """The plain spelling."""
        settings = self.llama.to_diff_dict() | {"num_hidden_layers": 1, "model_type": "llama"}
        # As older readers spell it.
        rope: dict[str, Any] = dict(self.llama.rope_parameters or {})
        settings["rope_theta"] = rope.pop("rope_theta", None)
        settings["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
        if self.kind == 1:
            return settings | {"architectures": ["EagleLlamaForCausalLM"]}
        made = settings | {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": self.target_size}
        made |= {"norm_before_residual": True} if self.norm_before_residual else {}
        return made | ({_LAYERS_KEY: list(self.layers)} if self.layers else {})


def parse_config(settings: dict[str, Any], kind: int) -> EagleConfig:
    """Raises ValueError, TypeError or KeyError for what this is not."""
    nested = settings.get("transformer_layer_config")
    layer = settings if nested is None else nested
    eagle = settings.get("eagle_config") or {}
    if strange := [name for name in _UNKNOWN if settings.get(name)]:
        raise ValueError(f"its variant with {strange[0]} is not known")
    if eagle.get("use_aux_hidden_state") is False:
        raise ValueError("its variant without layers of the target is not known")
    llama = _llama(layer)
    before = settings.get("norm_before_residual", nested is not None)
    size = settings.get("target_hidden_size") or llama.hidden_size
    if type(before) is not bool or not 0 < _whole(size, "target_hidden_size") <= _MOST["hidden_size"]:
        raise ValueError(f"norm_before_residual {before!r:.20}, target_hidden_size {size!r:.20}")
    if kind == 1:
        return EagleConfig(1, llama)
    return EagleConfig(3, llama, _layers(settings, eagle), size, before)


def _llama(layer: dict[str, Any]) -> LlamaConfig:
    settings = {name: value for name in (*_MOST, *_OTHERS) if (value := layer.get(name)) is not None}
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"it has {layer['num_hidden_layers']!r:.20} layers")
    if layer.get("mlp_bias"):
        raise ValueError("its variant with mlp_bias is not known")
    for name, most in _MOST.items():
        if name in settings and not 0 < _whole(settings[name], name) <= most:
            raise ValueError(f"{name} is {settings[name]}")
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        settings[name]  # without its default
    if "head_dim" not in settings and settings["hidden_size"] % settings["num_attention_heads"]:
        raise ValueError("num_attention_heads does not divide hidden_size")
    try:
        llama = LlamaConfig(**settings | {"num_hidden_layers": 1})
    except Exception as error:  # its checks raise a kind of their own
        raise ValueError(str(error).strip().splitlines()[-1].strip()) from error
    rope = llama.rope_parameters["rope_type"] if llama.rope_parameters else "default"
    if rope not in _ROPE:
        raise ValueError(f"rotary embeddings of type {rope!r:.20} are not known")
    if llama.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act {llama.hidden_act!r:.20} is not known")
    if llama.num_attention_heads % (llama.num_key_value_heads or 1) or (llama.head_dim or 1) % 2:
        raise ValueError(f"{llama.num_attention_heads} heads, {llama.num_key_value_heads} of keys and values")
    return llama


def _layers(settings: dict[str, Any], eagle: dict[str, Any]) -> tuple[int, ...]:
    above, within = settings.get(_LAYERS_KEY), eagle.get(_LAYERS_KEY)
    said = [_whole(it, _LAYERS_KEY) + (above is None) for it in (above if above is not None else within) or []]
    if len(said) > _MOST_FED or any(not 0 <= it <= _MOST_LAYERS for it in said):
        raise ValueError(f"{_LAYERS_KEY} is {said!r:.40}")
    return tuple(said)


def _whole(value: object, name: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r:.20}")
    return value
