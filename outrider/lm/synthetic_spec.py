"""The settings of a synthetic model: a deterministic law without weights, for tests and for load without a model."""

from dataclasses import dataclass, fields

from outrider.lm.engine import ModelRefused


@dataclass(frozen=True)
class SyntheticSpec:
    """`synthetic:vocab_size=8,seed=3,...`

    Attributes:
        vocab_size: real token ids.
        padded_vocab_size: rows of the output head; 0 means vocab_size.
        seed: equal seeds give equal models.
        order: how many of the last tokens the logits depend on; 0 gives one law everywhere.
        scale: standard deviation of the logits.
        noise: standard deviation of what is added to the logits of `seed` under `noise_seed`: a draft that resembles
            its target has the target's seed and some noise.
        noise_seed: seed of that addition.
        agree: part of the rows that are those of the model itself; in the others every logit is its neighbour's, so
            that a greedy draft is wrong there. Which ones depends on position, first token and the last `order` tokens.
        context_length: longest sequence, in tokens.
        eos: end-of-sequence token, or -1 for none.
        pass_ms: milliseconds that one forward pass takes.
        item_us: microseconds on top for each sequence in the pass.
        position_us: microseconds on top for each position.
        load_ms: milliseconds that loading takes.
    """

    vocab_size: int = 16
    padded_vocab_size: int = 0
    seed: int = 0
    order: int = 2
    scale: float = 1.5
    noise: float = 0.0
    noise_seed: int = 1
    agree: float = 1.0
    context_length: int = 4096
    eos: int = -1
    pass_ms: float = 0.0
    item_us: float = 0.0
    position_us: float = 0.0
    load_ms: float = 0.0

    @staticmethod
    def parse(text: str) -> "SyntheticSpec":
        """Parses KEY=VALUE pairs separated by commas. Raises ModelRefused naming the key."""
        types = {item.name: item.type for item in fields(SyntheticSpec)}
        values: dict[str, float] = {}
        for pair in filter(None, text.split(",")):
            key, _, value = pair.partition("=")
            if key not in types:
                raise ModelRefused(f"synthetic model: unknown setting {key!r}, known are {', '.join(types)}")
            try:
                values[key] = int(value) if types[key] is int else float(value)
            except ValueError:
                raise ModelRefused(f"synthetic model: {key}={value!r} is no number") from None
        spec = SyntheticSpec(**values)  # type: ignore[arg-type]
        if spec.vocab_size < 2 or spec.context_length < 2:
            raise ModelRefused("synthetic model: vocab_size and context_length must be at least 2")
        return spec
