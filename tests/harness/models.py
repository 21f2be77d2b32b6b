"""Tiny random models of real architectures, in directories as `from_pretrained` reads them."""

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.lm.quiet import quiet

VOCAB = 61
CONTEXT = 256
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": CONTEXT}
_GQA = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_MHA = {**_SIZES, "num_attention_heads": 4, "intermediate_size": 48}
WINDOW = 8

# Architecture -> (configuration class, its settings).
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {**_GQA, "head_dim": 8}),
    "llama_tied": ("LlamaConfig", {**_GQA, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen2_biases": ("Qwen2Config", _GQA),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 8}),
    "mistral_window": ("MistralConfig", {**_GQA, "head_dim": 8, "sliding_window": WINDOW}),
    "gemma2_softcap": (
        "Gemma2Config",
        {**_GQA, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**_GQA, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gpt_oss_sinks": (
        "GptOssConfig",
        {
            **_GQA,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mixtral": ("MixtralConfig", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("PhiConfig", {**_GQA, "partial_rotary_factor": 0.5}),
    "phi3_window": ("Phi3Config", {**_GQA, "sliding_window": WINDOW, "pad_token_id": 0}),
    "stablelm": ("StableLmConfig", _GQA),
    "cohere2": ("Cohere2Config", {**_GQA, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", _GQA),
    "gpt_neox": ("GPTNeoXConfig", _MHA),
    "gptj": (
        "GPTJConfig",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "rotary_dim": 4},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "opt": ("OPTConfig", {**_SIZES, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": ("Starcoder2Config", {**_GQA, "sliding_window": WINDOW}),
    "falcon": ("FalconConfig", {**_MHA, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "deepseek_v3_mla": (
        "DeepseekV3Config",
        {
            **_MHA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "first_k_dense_replace": 1,
        },
    ),
}


def tiny_config(architecture: str, **changes: object) -> PreTrainedConfig:
    """The configuration of one of ARCHITECTURES."""
    name, settings = ARCHITECTURES[architecture]
    config: PreTrainedConfig = getattr(transformers, name)(**{"eos_token_id": 2, **settings, **changes})
    return config


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with weights of that seed, strong enough for every mistake to show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1 + 0.1 * noise if is_scale else 0.25 * noise)
    return model.requires_grad_(False)


def save_tiny(directory: Path, architecture: str, **changes: object) -> str:
    """Saves a tiny model into the directory and returns it as a MODEL."""
    with quiet(lambda _fraction, _what: None):
        tiny_model(tiny_config(architecture, **changes)).save_pretrained(directory)
    return str(directory)
