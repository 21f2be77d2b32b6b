"""Features: hidden states of a model on the way to its logits, for drafts that are fed by them.

Which ones is said as transformers counts `hidden_states`: 0 is the embedding, i the output of layer i, and the last
one, the number of layers, what the head gets: the last layer's output after the final norm.
"""

from collections.abc import Iterable, Sequence

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
