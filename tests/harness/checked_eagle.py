"""An EAGLE engine whose every row is held against the formulas, with states that the target itself says it had."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.law.sparse import Int32Array
from outrider.lm.eagle import EagleEngine
from outrider.lm.eagle_sequence import EagleSequence, eagle_sequence
from outrider.lm.engine import EngineInfo, Segment
from tests.harness.eagle import said_by_formula
from tests.harness.medusa import walking_vocabulary
from tests.harness.wrappers import served_as

# Of the largest logit: states travel in bfloat16, and the target's paged pass rounds otherwise than its own.
_TOLERANCE = 0.02


class CheckedEagle:
    """Says what the engine inside says, and counts the rows that were right.

    Args:
        target: the model whose states feed it.
        tensors: of the head, by their public names.
        window: tokens whose states it says that it wants.

    Attributes:
        wrong: what was said otherwise.
        checked: rows that were held against the formulas.
        drafted: of them, those of tokens whose own entry was made of an output.
        remade: segments that held a whole text and what was drafted after it.
        begins: places at which sequences had their first entry.
    """

    def __init__(
        self, inner: EagleEngine, target: PreTrainedModel, tensors: dict[str, torch.Tensor], window: int
    ) -> None:
        feeding = inner.info.feeding
        assert feeding is not None
        served = served_as(inner.info, walking_vocabulary())
        self._info = replace(served, feeding=replace(feeding, window=window))
        self._inner, self._target, self._tensors = inner, target, tensors
        # The tokens of each sequence, with the places that they follow.
        self._texts: dict[int, list[tuple[int, int]]] = {}
        self._alive: list[EagleSequence] = []
        self.checked = self.drafted = self.remade = 0
        self.wrong: list[str] = []
        self.begins: set[int] = set()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def open(self, tokens: Int32Array) -> EagleSequence:
        self._alive.append(self._inner.open(tokens))  # keeps its id
        return self._alive[-1]

    def pages(self) -> tuple[int, int]:
        return self._inner.pages()

    def shared_pages(self) -> int:
        return self._inner.shared_pages()

    def forward(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        starts = [segment.sequence.length for segment in segments]
        rows = self._inner.forward(segments)
        for segment, start, logits in zip(segments, starts, rows, strict=True):
            self.remade += not start and segment.fed is not None and len(segment.tokens) > 1 + segment.fed.end
            text = self._texts.setdefault(id(segment.sequence), [])
            parents = range(start - 1, start + len(segment.tokens) - 1) if segment.parents is None else segment.parents
            text[start:] = zip(segment.tokens.tolist(), map(int, parents), strict=True)
            for number, said in enumerate(logits, len(text) - len(logits)):
                self._check(segment, number, said)
        return rows

    def _check(self, segment: Segment, place: int, said: torch.Tensor) -> None:
        sequence = eagle_sequence(segment.sequence)
        text, path = self._texts[id(sequence)], []
        while place >= 0:
            token, place = text[place]
            path.append(token)
        assert segment.fed is not None
        if not segment.fed.states.any():
            return  # the worker's warm-up
        tokens, end = path[::-1], segment.fed.end
        states = self._states(tokens[:end])
        known = {at: states[at] for at in range(sequence.begin - 1, end)}
        model = self._target
        words, head = (it.weight for it in (model.get_input_embeddings(), model.get_output_embeddings()))  # type: ignore[no-untyped-call]
        expected = said_by_formula(self._tensors, words, head, tokens, known, sequence.begin)[-1]
        scored = expected > -1e29
        error = float((said - expected)[scored].abs().max() / expected[scored].abs().max())
        if error > _TOLERANCE or not torch.equal(said < -1e29, ~scored):
            self.wrong.append(f"differs by {error:.2g} after {len(tokens)} tokens, {end} fed")
        self.checked += 1
        self.drafted += len(tokens) > end + 1
        self.begins.add(sequence.begin)

    @torch.inference_mode()
    def _states(self, tokens: list[int]) -> torch.Tensor:
        """[n, width] float32 of the target's own forward, rounded as they travel."""
        feeding = self._inner.info.feeding
        assert feeding is not None
        ids = torch.from_numpy(np.array(tokens, np.int64))[None]
        said = self._target(input_ids=ids, use_cache=False, output_hidden_states=True)
        return torch.cat([said.hidden_states[layer][0] for layer in feeding.layers], -1).bfloat16().float()
