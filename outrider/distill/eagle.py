"""An EAGLE head while it learns: fed by the target's states in its own text, and by what it makes of them itself.

The first kind learns as Li et al. 2024, section 4.2: smooth L1 towards the target's next state, and cross-entropy of
what the target's head says of it; uniform noise on the states. The third (Li et al. 2025, section 3) learns what the
target says alone, at several places of a block with its own states in those further on, and has a head of few tokens.
Either may learn at one place or at several. What is taught is the target's law, not only the token that stands there.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss
from transformers import LlamaConfig

from outrider.distill.batches import Batch
from outrider.distill.eagle_layer import EagleLayer, EagleModule
from outrider.distill.student import SoftTargets, laws_of
from outrider.lm.checkpoint import load_config, load_weights
from outrider.lm.decoder import Decoder
from outrider.lm.distilled import reduced
from outrider.lm.eagle_config import EagleConfig
from outrider.lm.eagle_weights import EagleWeights
from outrider.lm.engine import ModelRefused
from outrider.lm.quiet import quiet
from outrider.lm.source import ModelSource

# Of the loss, for each place further on in a block.
_FURTHER = 0.8
# L1 over cross-entropy, and the noise's largest element: as in the paper.
_STATES_WEIGHT = 10.0
_NOISE = 0.1
# Of the target's layer, that this one has too.
_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


class EagleStudent:
    """float32 weights; embeddings are the target's and do not learn, nor does its head, which kind 1 uses. Raises
    ModelRefused when the configuration is none for this target.

    Args:
        config: of what is made (`eagle_config`).
        kept: [n] int32, ascending: the tokens that the loss looks at; those of the third kind's own head.
        positions: places of a block that it learns at.
        places: of a block that it is asked about.
    """

    def __init__(
        self,
        target: ModelSource,
        config: EagleConfig,
        kept: torch.Tensor,
        positions: int,
        places: int,
        device: torch.device,
    ) -> None:
        with quiet(lambda _fraction, _what: None):
            model = load_weights(target, load_config(target), "float32", device)
        decoder = Decoder.of(model)
        size, llama = decoder.head.in_features, config.llama
        if not size == llama.hidden_size == config.target_size or config.norm_before_residual:
            raise ModelRefused("the EAGLE head was made for another target, or cannot go on learning")
        self._config, self._kept, self._positions, self._places = config, kept, positions, places
        self._embeddings = decoder.embeddings
        self._head = reduced(decoder.head, kept.long().to(device))
        self.learned = EagleModule(config, len(kept)).to(device)
        with torch.no_grad():
            _begin(self.learned, decoder, self._head)

    def go_on(self, weights: EagleWeights) -> None:
        """Takes the weights of a head that is there. Raises ModelRefused for a variant that cannot learn here."""
        tensors = {name: it for name, it in weights.tensors.items() if name != "embed_tokens.weight"}
        try:
            self.learned.load_state_dict(tensors)
        except RuntimeError as error:
            raise ModelRefused("the EAGLE head is of a variant that cannot go on learning") from error

    def loss(self, batch: Batch, weights: torch.Tensor) -> torch.Tensor:
        """A scalar, over all places; `weights` [laws, k] of each law's tokens."""
        states = _states(batch)
        given = states + _noise(batch, states) if self._config.kind == 1 else states
        losses = []
        for place, made in enumerate(self._made(batch, given, self._positions)):
            entries, laws = _lessons(batch, place)
            own = made[entries]
            loss = SoftTargets.apply(self._logits(own), batch.columns[laws], weights[laws])  # type: ignore[no-untyped-call]
            if self._config.kind == 1:
                wanted = states[:, 1:][entries]
                far = smooth_l1_loss(own, wanted, reduction="sum") / (wanted.shape[1] * len(weights))
                loss = loss + _STATES_WEIGHT * far
            losses.append(_FURTHER**place * loss)
        return torch.stack(losses).sum()

    def said(self, batch: Batch) -> Sequence[torch.Tensor]:
        """Of each place of a block what it says at each law, [laws, kept], when the block's earlier tokens were right;
        all equal where a text is too young for it."""
        rows = []
        for place, made in enumerate(self._made(batch, _states(batch), self._places)):
            entries, laws = _lessons(batch, place)
            logits = made.new_zeros(len(batch.columns), len(self._kept))
            logits[laws] = self._logits(made[entries]).to(logits.dtype)
            rows.append(logits)
        return rows

    def weights(self) -> EagleWeights:
        """What is served, in bfloat16."""
        tensors = {name: tensor.detach().bfloat16().cpu() for name, tensor in self.learned.state_dict().items()}
        return EagleWeights(self._config, tensors, self._kept.long() if self._config.kind == 3 else None)

    def _made(self, batch: Batch, states: torch.Tensor, places: int) -> list[torch.Tensor]:
        embeddings = self._embeddings(batch.tokens[:, 1:])
        made: list[torch.Tensor] = self.learned(states[:, :-1], embeddings, places)
        return made

    def _logits(self, made: torch.Tensor) -> torch.Tensor:
        head = self.learned.lm_head if self._config.kind == 3 else self._head
        logits: torch.Tensor = head(self.learned.before_head(made))
        return logits


def eagle_config(kind: int, target: ModelSource) -> EagleConfig:
    """Of a head with a layer like the target's. Raises ModelRefused as `load_config`."""
    text = load_config(target).get_text_config(decoder=True)
    settings = {name: value for name in _SETTINGS if (value := getattr(text, name, None)) is not None}
    made = EagleConfig(kind, LlamaConfig(**settings, num_hidden_layers=1))
    layers: int = text.num_hidden_layers
    # Of a target of few layers the public choice would name one twice or none.
    few = tuple(sorted({min(2, layers), layers // 2, max(0, layers - 3)}))
    return made if kind == 1 else EagleConfig(kind, made.llama, few)


def _states(batch: Batch) -> torch.Tensor:
    assert batch.states is not None, "the texts have no states"
    return batch.states


def _noise(batch: Batch, states: torch.Tensor) -> torch.Tensor:
    """A function of the batch, so that a resumed run draws the same."""
    seed = int((batch.tokens.flatten().cumsum(0) % 1_000_003).sum())
    draws = torch.rand(states.shape, generator=torch.Generator().manual_seed(seed))
    return ((2 * draws - 1) * _NOISE).to(states)


def _lessons(batch: Batch, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(entries [texts, n - 1] bool, laws [m]) of a place: entry i says what the law at token i + 1 is about."""
    entries = batch.wanted[:, 1:].clone()
    entries[:, :place] = False
    return entries, laws_of(batch)[:, 1:][entries]


def _begin(module: EagleModule, decoder: Decoder, head: nn.Linear) -> None:
    """Begins as the target's last layer. The first kind's is at first silent: its residual stream is the normed state,
    much smaller than the one that the layer was made for. The third kind's goes on from the highest state."""
    _copy(module.layer, decoder.layers[-1])
    own = torch.eye(decoder.embeddings.embedding_dim)
    if module.layer.self_attn.q_proj.in_features == len(own):
        module.layer.self_attn.o_proj.weight.zero_()
        module.layer.mlp.down_proj.weight.zero_()
        module.fc.weight.copy_(torch.cat([own, own], 1))
        return
    module.fc.weight.zero_()
    module.fc.weight[:, -len(own) :] = own
    module.norm.load_state_dict(decoder.norm.state_dict())
    module.lm_head.weight.copy_(head.weight)


def _copy(layer: EagleLayer, like: nn.Module) -> None:
    """What has a name and a shape in both; of what is twice as wide, both halves."""
    theirs, ours = like.state_dict(), layer.state_dict()
    for name, tensor in ours.items():
        found = theirs.get(name.replace("hidden_norm", "input_layernorm"))
        if found is not None and found.shape == tensor.shape:
            tensor.copy_(found)
        elif found is not None and tensor.shape == (found.shape[0], 2 * found.shape[1]):
            tensor.copy_(torch.cat([found, found], 1) / 2)
