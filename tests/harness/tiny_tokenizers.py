"""Tokenizers of the families that real models have, small enough to build in a test."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. the quick quick brown dog, the END of it",
    "안녕하세요 세계, 한국어 문장입니다. 안녕하세요",
    "naïve café déjà vu, Straße, e\u0301",
    "def f(x):\n    return x + 1\n\n\tprint(f(2))",
    "👩‍👩‍👧‍👦 😀 日本語テキスト العربية",
]
# Hangul, a family emoji joined by ZWJ, a flag, accents composed and combining, a right-to-left mark, NUL.
MIXED = "안녕 👩‍👩‍👧‍👦🇰🇷 café e\u0301 ﷺ שלום\u200f x\x00y 한국어 naïve 日本 😀."
SPECIALS = ["<s>", "</s>", "<|im_end|>"]


@cache
def byte_level() -> PreTrainedTokenizerBase:
    """GPT-2, Llama 3, Qwen, SmolLM: BPE over bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [AddedToken("<tool>", special=False), AddedToken("ñ", special=False), AddedToken("語る", special=False)]
    )
    return _wrapped(backend)


@cache
def byte_fallback() -> PreTrainedTokenizerBase:
    """Llama 2, Mistral: SentencePiece BPE, bytes for what the vocabulary lacks, a BOS before every text."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzTE ND.,é", "▁t", "▁th", "he", "▁the", "qu", "END", "▁▁"]
    merges = [("▁", "t"), ("▁t", "h"), ("h", "e"), ("▁t", "he"), ("▁th", "e"), ("q", "u"), ("▁", "▁")]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return _wrapped(backend)


@cache
def gemma_like() -> PreTrainedTokenizerBase:
    """Gemma: as Llama 2, but no space is put before a text and none is stripped."""
    backend = Tokenizer.from_str(byte_fallback().backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrapped(backend)


@cache
def unigram() -> PreTrainedTokenizerBase:
    """T5, XLM-R: SentencePiece Unigram with Metaspace; its vocabulary holds every character of the corpus."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*CORPUS, MIXED], trainer)
    return _wrapped(backend)


@cache
def word_piece() -> PreTrainedTokenizerBase:
    """BERT: a decoder that looks at its neighbours, as no causal model has it; stands for every other decoder."""
    words = ["[UNK]", *SPECIALS, "the", "quick", "dog", "##s", "##er", ".", ",", "do", "n", "'", "t"]
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(SPECIALS)
    return _wrapped(backend)


def text_after(tokenizer: PreTrainedTokenizerBase, prompt: list[int], generated: list[int]) -> str:
    """What the tokenizer itself says that the generated tokens add to the prompt."""

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    whole, before = decode(prompt + generated), decode(prompt)
    assert whole.startswith(before)
    return whole[len(before) :]


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
