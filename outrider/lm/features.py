"""Features: hidden states of a model on the way to its logits, for drafts that are fed by them.

Which ones is said as transformers counts `hidden_states`: 0 is the embedding, i the output of layer i, and the last
one, the number of layers, what the head gets: the last layer's output after the final norm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


class Hidden:
    """What a pass brings back beside its logits, for all of its rows.

    Args:
        layers: the ones that somebody wants.
        last: of them, the one that stands for the final norm's output: the number of layers.
    """

    def __init__(self, layers: Iterable[int], last: int) -> None:
        self.layers, self.last = frozenset(layers), last
        self._states: dict[int, torch.Tensor] = {}

    def see(self, layer: int, states: torch.Tensor) -> None:
        """The states [n, hidden size] after a layer; kept where they are wanted."""
        if layer in self.layers:
            self._states[layer] = states

    def of(self, layers: Sequence[int]) -> torch.Tensor:
        """[n, len(layers) * hidden size] bfloat16. Raises KeyError for one that the model did not show."""
        return torch.cat([self._states[layer].to(torch.bfloat16) for layer in layers], -1)


class Tap:
    """Gathers the features of one piece of work, over as many passes as it takes.

    Args:
        layers: which ones, side by side in this order.
        first: position of the first token whose features are wanted.
    """

    def __init__(self, layers: Sequence[int], first: int) -> None:
        self.layers, self.first = tuple(layers), first
        self._parts: list[torch.Tensor] = []

    def take(self, start: int, states: torch.Tensor) -> None:
        """The next states [n, len(layers) * hidden size], of the tokens from position `start` on."""
        self._parts.append(states[max(0, self.first - start) :].cpu())

    def clear(self) -> None:
        """The work begins anew."""
        self._parts.clear()

    def states(self) -> torch.Tensor:
        """[n, len(layers) * hidden size] bfloat16, n tokens from `first` on."""
        return torch.cat(self._parts) if self._parts else torch.empty(0, 0, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Feeding:
    """What an engine that is fed by features wants.

    Attributes:
        layers: of the target, side by side.
        hidden_size: elements of one.
        window: most tokens whose features it looks at.
        longest: most tokens that it can say beyond them; 0 for any number.
    """

    layers: tuple[int, ...]
    hidden_size: int
    window: int
    longest: int = 0

    @property
    def width(self) -> int:
        """Elements of one token's features."""
        return len(self.layers) * self.hidden_size


class FeatureWindow:
    """The features of the last tokens of a text, without a gap.

    Args:
        most: tokens that are kept; older ones are forgotten.

    Attributes:
        end: position after the last of them; 0 when there are none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: torch.Tensor | None = None
        self.end = 0

    @property
    def start(self) -> int:
        """Position of the first of them."""
        return self.end - (0 if self._states is None else len(self._states))

    @property
    def states(self) -> torch.Tensor:
        """[end - start, width] bfloat16."""
        return torch.empty(0, 0, dtype=torch.bfloat16) if self._states is None else self._states

    def take(self, start: int, states: torch.Tensor) -> None:
        """The features [n, width] of tokens from `start` on replace what is known of these; where they leave a gap,
        what lies before it is forgotten."""
        if self._states is None or not self.start <= start <= self.end:
            known = states
        else:
            known = torch.cat([self._states[: start - self.start], states])
        self._states, self.end = known[-self._most :], start + len(states)

    def cut(self, end: int) -> None:
        """Forgets those of tokens from `end` on."""
        if self._states is not None and end < self.end:
            self._states, self.end = self._states[: max(0, end - self.start)], end

    def after(self, start: int) -> tuple[int, torch.Tensor]:
        """(position of the first, features [n, width]) of those from `start` on."""
        first = max(start, self.start)
        return first, self.states[first - self.start :]
