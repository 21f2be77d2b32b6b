"""Models that a bench makes for itself: random weights of a real architecture and size, or the demo's target.

python -m bench.made_model DIRECTORY [--demo]
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from outrider.cli.weights import fetch
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.quiet import quiet
from outrider.lm.source import parse_source
from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.lm.tokenizer import load_tokenizer, synthetic_tokenizer

TINY_VOCABULARY = 26


def tiny_model(directory: str) -> str:
    """A MODEL of two layers, which transformers loads too."""
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    return _saved(config, torch.float32, synthetic_tokenizer(SyntheticSpec(vocab_size=TINY_VOCABULARY)), directory)


def made_model(directory: str, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """A MODEL of 0.4B parameters in bfloat16, under the tokenizer given or one of single characters."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    tokenizer = tokenizer or synthetic_tokenizer(SyntheticSpec(vocab_size=config.vocab_size))
    return _saved(config, torch.bfloat16, tokenizer, directory)


def _saved(config: LlamaConfig, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase, directory: str) -> str:
    torch.manual_seed(0)
    with quiet(lambda _part, _what: None):
        LlamaForCausalLM._from_config(config, dtype=dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def demo_model(directory: str) -> str:
    """The demo's target in bfloat16, as servers read it that know no GGUF."""
    source = parse_source(f"gguf:{fetch()}")
    model = load_weights(source, load_config(source), "bfloat16", torch.device("cpu"))
    del model.config.quantization_config
    model.save_pretrained(directory)
    load_tokenizer(source.name).save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--demo", action="store_true", help="the demo's target instead of a random model")
    options = parser.parse_args()
    if options.demo:
        demo_model(options.directory)
    else:
        made_model(options.directory, load_tokenizer(f"gguf:{fetch()}"))


if __name__ == "__main__":
    main()
