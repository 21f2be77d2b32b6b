"""Medusa: heads on the target's last hidden state, each of which says the token at one position further on.

Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads", section 2.1: head k
takes the state after a token to the token k + 1 places after the one that the target itself draws there, through blocks
x + SiLU(W x + b) and an output matrix.

A directory holds them in the public layout: `config.json` with `medusa_num_heads` and `medusa_num_layers`, and
`medusa_lm_head.safetensors` or `medusa_lm_head.pt` with, for head h of n blocks, `h.b.linear.weight` and
`h.b.linear.bias` for b < n, and `h.n.weight`. A head without an output matrix uses the target's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.law.sparse import Int32Array
from outrider.lm.engine import EngineInfo, ModelRefused, Segment
from outrider.lm.features import Feeding
from outrider.lm.packed import pack_linears
from outrider.lm.token_sequence import TokenSequence, token_sequence

WEIGHTS, PICKLED, CONFIG = "medusa_lm_head.safetensors", "medusa_lm_head.pt", "config.json"
# More heads than any draft has positions that are ever right.
_MOST_HEADS, _MOST_BLOCKS = 16, 8


@dataclass(frozen=True)
class MedusaWeights:
    """What the directory holds.

    Attributes:
        heads, blocks: how many, and of each how many blocks.
        tensors: by the names of the public layout.
    """

    heads: int
    blocks: int
    tensors: dict[str, torch.Tensor] = field(repr=False)

    @staticmethod
    def load(directory: Path) -> "MedusaWeights":
        """Raises ModelRefused with one sentence when the directory holds no such heads."""
        try:
            config = json.loads((directory / CONFIG).read_text())
            heads, blocks = config["medusa_num_heads"], config.get("medusa_num_layers", 1)
            if type(heads) is not int or type(blocks) is not int or not (heads >= 1 and 0 <= blocks <= _MOST_BLOCKS):
                raise ValueError(f"{heads!r:.20} heads of {blocks!r:.20} blocks")
            tensors = _read(directory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise ModelRefused(f"{directory} holds no Medusa heads: {error}") from error
        # Some were published with fewer heads in the configuration than in the file, and some the other way round.
        found = {int(name.split(".", 1)[0]) for name in tensors}
        heads = min(heads, _MOST_HEADS, len(found))
        if found < set(range(heads)):
            raise ModelRefused(f"{directory} holds no Medusa heads: head {min(set(range(heads)) - found)} is missing")
        return MedusaWeights(heads, blocks, tensors)

    def save(self, directory: Path, base: str) -> None:
        """Writes the public layout; `base` is the MODEL that they were made for."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, directory / WEIGHTS)
        config = {"medusa_num_heads": self.heads, "medusa_num_layers": self.blocks, "base_model_name_or_path": base}
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _read(directory: Path) -> dict[str, torch.Tensor]:
    if (directory / WEIGHTS).exists():
        tensors = load_file(directory / WEIGHTS)
    else:
        tensors = torch.load(directory / PICKLED, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(it, torch.Tensor) for it in tensors.values()):
        raise ValueError("its weights are no tensors by name")
    # Saved from a whole model they carry its attribute's name.
    named = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    if not named or not all(name.split(".", 1)[0].isdigit() for name in named):
        raise ValueError("its weights have other names")
    return named


class MedusaHeads:
    """The heads of a target, whose output matrix [vocab, hidden size] serves those without one of their own.

    Attributes:
        count: how many.
        size: of the states that they take.

    Args:
        pack: whether linear weights are packed for the CPU.

    Raises ModelRefused when the weights do not fit the target.
    """

    def __init__(self, weights: MedusaWeights, head: nn.Linear, *, pack: bool = False) -> None:
        self.count, self.size = weights.heads, head.in_features
        self._like = head.weight.new_empty(0)
        blocks = [
            nn.ModuleList(nn.Linear(self.size, self.size) for _ in range(weights.blocks)) for _ in range(self.count)
        ]
        try:
            for index, of_head in enumerate(blocks):
                for number, block in enumerate(of_head):
                    names = ("weight", "bias")
                    block.load_state_dict({it: weights.tensors[f"{index}.{number}.linear.{it}"] for it in names})
            rows = [weights.tensors.get(f"{index}.{weights.blocks}.weight") for index in range(self.count)]
            outputs = nn.ModuleList(head if own is None else _output(own, head) for own in rows)
        except (KeyError, RuntimeError) as error:
            raise ModelRefused(f"the Medusa heads are for another target: {str(error).splitlines()[0]}") from error
        modules = nn.ModuleList([*blocks, outputs]).to(self._like.device, self._like.dtype).requires_grad_(False)
        if pack:
            pack_linears(modules)
        self._blocks, self._outputs = [list(of_head) for of_head in blocks], list(outputs)

    def logits(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """[n, head rows], in the target's dtype, of head `index` after the states [n, hidden size]."""
        states = states.to(self._like)
        for block in self._blocks[index]:
            states = states + nn.functional.silu(block(states))
        logits: torch.Tensor = self._outputs[index](states)
        return logits


def _output(rows: torch.Tensor, head: nn.Linear) -> nn.Linear:
    made = nn.Linear(head.in_features, head.out_features, bias=False)
    made.load_state_dict({"weight": rows})
    return made


class MedusaEngine:
    """An Engine whose rows are those of the heads: what a row says depends on how far it is from the last token whose
    features are known, and on these alone. It has no state but the tokens that it was given.

    Args:
        info: of the target's vocabulary.
        layers: of the target, whose last one feeds the heads.
    """

    def __init__(self, heads: MedusaHeads, info: EngineInfo, layers: int) -> None:
        self._heads = heads
        self._info = replace(info, feeding=Feeding((layers,), heads.size, window=1, longest=heads.count), hidden_size=0)

    @property
    def info(self) -> EngineInfo:
        """What is served."""
        return self._info

    def open(self, tokens: Int32Array) -> TokenSequence:
        """An empty sequence."""
        return TokenSequence()

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """As in Engine.forward. Raises ValueError for a row without features, or beyond the last head."""
        # Heads with (segment, its rows by place) that want them; each runs once.
        wanted: dict[int, dict[int, None]] = {}
        numbers = [self._append(segment) for segment in segments]
        for index, heads in enumerate(numbers):
            for head in heads:
                wanted.setdefault(head, {})[index] = None
        said: dict[tuple[int, int], torch.Tensor] = {}
        for head, indices in wanted.items():
            states = torch.cat([_last(segments[index]) for index in indices])
            logits = self._heads.logits(head, states)
            said |= {(index, head): row for index, row in zip(indices, logits[:, : self._info.vocab_size], strict=True)}
        empty = torch.empty(0, self._info.vocab_size)
        return [
            torch.stack([said[index, head] for head in heads]) if heads else empty
            for index, heads in enumerate(numbers)
        ]

    def pages(self) -> tuple[int, int]:
        """(0, 0): no KV cache."""
        return 0, 0

    def shared_pages(self) -> int:
        """0: no KV cache."""
        return 0

    def _append(self, segment: Segment) -> list[int]:
        """Appends a segment; returns the head of each row that is wanted."""
        sequence = token_sequence(segment.sequence)
        sequence.append(segment.tokens, segment.parents)
        heads = [sequence.position_of(place) - _end(segment) for place in range(sequence.length)[-segment.rows :]]
        heads = heads if segment.rows else []
        if heads and not 0 <= min(heads) <= max(heads) < self._heads.count:
            raise ValueError(f"rows for heads {min(heads)} to {max(heads)}, there are {self._heads.count}")
        return heads


def _end(segment: Segment) -> int:
    if segment.rows and (segment.fed is None or not segment.fed.end):
        raise ValueError("the segment is not fed")
    return segment.fed.end if segment.fed is not None else 0


def _last(segment: Segment) -> torch.Tensor:
    """[1, hidden size]"""
    assert segment.fed is not None
    return segment.fed.states[-1:]
