"""From logits to a law, in the order of types.proto's SamplingParams and with the arithmetic of transformers' logits
processors. float32 inside, on whatever device the logits are.

What those leave open is decided here: at the border of top-p the lowest ids among equals are kept (at that of top-k all
are, as there), and the argmax of a greedy law is the lowest id among equals. A row's law does not depend on the other
rows of the call, to the last bit: every reduction runs along a row, whole, so that a retry in other company repeats it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.law.adjust import RowContext, adjust
from outrider.law.parallel import for_rows
from outrider.law.params import LawParams
from outrider.law.sparse import Int32Array

# Tokens this likely are most often enough for a nucleus.
_OFTEN_ENOUGH = 2.0**-12

__all__ = ["NonFiniteLogits", "RowContext", "greedy_tokens", "law_probs"]


class NonFiniteLogits(ValueError):
    """Logits that are no law: NaN, +inf, or nothing above -inf.

    Attributes:
        rows: indices of the rows concerned, ascending.
    """

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"rows {rows} hold NaN, +inf, or no finite logit")
        self.rows = rows


def law_probs(logits: torch.Tensor, contexts: Sequence[RowContext], vocab_size: int) -> torch.Tensor:
    """The law of each row after every transform.

    Args:
        logits: [rows, >= vocab_size] raw logits, any float dtype; columns from vocab_size on are padding. Not changed.
        contexts: [rows] what each row's law depends on besides its logits. Tokens are in [0, vocab_size).
        vocab_size: real token ids.

    Returns [rows, vocab_size] float32, each row summing to 1 within 1e-5; a new tensor on the device of the logits.
    Raises NonFiniteLogits naming the rows with NaN, +inf, or no finite logit before or after the transforms (a bias
    that bans the whole vocabulary); other rows are not computed then. Raises ValueError when contexts and rows differ
    in number.
    """
    adjusted, largest = _adjusted(logits, contexts, vocab_size)
    params = [context.params for context in contexts]
    greedy = [row for row, one in enumerate(params) if one.greedy]
    if not greedy:
        return _sampled(adjusted, largest, params)
    if len(greedy) == len(params):
        return _one_hot(adjusted)
    probs = torch.empty_like(adjusted)
    sampled = [row for row, one in enumerate(params) if not one.greedy]
    probs[greedy] = _one_hot(adjusted[greedy])
    probs[sampled] = _sampled(adjusted[sampled], largest[sampled], [params[row] for row in sampled])
    return probs


def greedy_tokens(logits: torch.Tensor, contexts: Sequence[RowContext], vocab_size: int) -> Int32Array:
    """The token of each row's law where all of them are greedy, without the laws: [rows] int32.

    Arguments and errors as in `law_probs`; the parameters from temperature on are not looked at.
    """
    adjusted, _ = _adjusted(logits, contexts, vocab_size)
    return _best(adjusted).cpu().numpy().astype(np.int32)


def _adjusted(
    logits: torch.Tensor, contexts: Sequence[RowContext], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores before temperature [rows, vocab_size] and the largest of each row [rows, 1]."""
    if len(contexts) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits, {len(contexts)} contexts")
    scores = logits.detach()[:, :vocab_size].float()
    largest = _require_finite(_largest(scores))
    adjusted = adjust(scores, contexts)
    if adjusted is not scores:
        largest = _require_finite(_largest(adjusted))
    return adjusted, largest


def _best(scores: torch.Tensor) -> torch.Tensor:
    """[rows] int64, the lowest id among the largest scores."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=1)
    # Ten times faster than torch's on a CPU.
    return torch.from_numpy(scores.numpy().argmax(axis=1))


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """[rows, 1], NaN where a row has one."""
    if scores.device.type != "cpu":
        return _largest_on_device(scores)
    # Three times faster than torch's on a CPU.
    return torch.from_numpy(scores.numpy().max(axis=1, keepdims=True))


def _largest_on_device(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(dim=1, keepdim=True)


def _require_finite(largest: torch.Tensor) -> torch.Tensor:
    """Returns the largest score of each row. It is NaN when one of the row is NaN, and -inf only when all are."""
    bad = ~torch.isfinite(largest)
    if bool(bad.any()):
        raise NonFiniteLogits([int(row) for row in bad.flatten().nonzero().flatten()])
    return largest


def _one_hot(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores).scatter_(1, _best(scores)[:, None], 1.0)


def _sampled(scores: torch.Tensor, largest: torch.Tensor, params: Sequence[LawParams]) -> torch.Tensor:
    if any(one.temperature != 1.0 for one in params):
        temperatures = _column(scores, [one.temperature for one in params])
        # Division keeps the order: the largest stays the largest.
        _require_finite(largest / temperatures)
        scores = scores / temperatures
    vocab_size = scores.shape[1]
    scores = _on_rows(scores, [0 < one.top_k < vocab_size for one in params], params, _top_k)
    scores = _on_rows(scores, [one.top_p < 1.0 for one in params], params, _top_p)
    scores = _on_rows(scores, [one.min_p > 0.0 for one in params], params, _min_p)
    return scores.softmax(dim=1)


def _on_rows(
    values: torch.Tensor,
    wanted: Sequence[bool],
    params: Sequence[LawParams],
    transform: Callable[[torch.Tensor, Sequence[LawParams]], torch.Tensor],
) -> torch.Tensor:
    """Applies the transform to the rows that want it, and does nothing for the others."""
    rows = [row for row, want in enumerate(wanted) if want]
    if not rows:
        return values
    if len(rows) == len(wanted):
        return transform(values, params)
    index = torch.tensor(rows, device=values.device)
    return values.index_copy(0, index, transform(values[index], [params[row] for row in rows]))


def _top_k(scores: torch.Tensor, params: Sequence[LawParams]) -> torch.Tensor:
    counts = torch.tensor([[one.top_k] for one in params], device=scores.device)
    best = scores.topk(max(one.top_k for one in params), dim=1).values
    return _keep(scores, scores >= best.gather(1, counts - 1))


def _top_p(scores: torch.Tensor, params: Sequence[LawParams]) -> torch.Tensor:
    nucleus = _nucleus if scores.device.type == "cpu" else _nucleus_on_device
    return nucleus(scores, [one.top_p for one in params])


def _nucleus(scores: torch.Tensor, limits: Sequence[float]) -> torch.Tensor:
    """The scores of the smallest sets of likeliest tokens whose mass reaches the limits, -inf elsewhere."""
    rows, laws = scores.numpy(), scores.softmax(dim=1).numpy()
    kept = np.full_like(rows, -np.inf)

    def nucleus(row: int) -> None:
        # Sorting is dear. All tokens below the last floor together have less than 1 - limit.
        for floor in (_OFTEN_ENOUGH, 0.999 * (1.0 - limits[row]) / scores.shape[1]):
            ids = np.flatnonzero(laws[row] >= np.float32(floor))
            mass = np.cumsum(np.sort(laws[row, ids])[::-1], dtype=np.float64)
            if mass.size and mass[-1] >= limits[row]:
                break
        # A token stays while the mass before it has not reached the limit; the likeliest always stays.
        size = min(int(np.searchsorted(mass, limits[row], side="left")), len(ids) - 1) + 1
        candidates = rows[row, ids]
        border = np.partition(candidates, -size)[-size]
        above, equal = ids[candidates > border], ids[candidates == border]
        for chosen in above, equal[: size - len(above)]:
            kept[row, chosen] = rows[row, chosen]

    for_rows(nucleus, *scores.shape)
    return torch.from_numpy(kept)


def _nucleus_on_device(scores: torch.Tensor, limits: Sequence[float]) -> torch.Tensor:
    """As `_nucleus`, without a loop over rows."""
    ordered = scores.sort(dim=1, descending=True).values
    mass = ordered.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    limit = torch.tensor(limits, dtype=torch.float64, device=scores.device)[:, None]
    sizes = (mass < limit).sum(dim=1, keepdim=True).clamp_(max=scores.shape[1] - 1) + 1
    border = ordered.gather(1, sizes - 1)
    return _keep(scores, _first_at_border(scores, scores >= border, border, sizes))


def _first_at_border(
    scores: torch.Tensor, kept: torch.Tensor, border: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Cuts each row of the mask to its size by dropping the highest ids among those equal to the border."""
    surplus = kept.sum(dim=1, keepdim=True) - sizes
    if not bool(surplus.any()):
        return kept
    equal = scores == border
    rank = equal.cumsum(dim=1)
    return kept & ~(equal & (rank > rank[:, -1:] - surplus))


def _min_p(scores: torch.Tensor, params: Sequence[LawParams]) -> torch.Tensor:
    probs = scores.softmax(dim=1)
    least = _column(probs, [one.min_p for one in params]) * probs.amax(dim=1, keepdim=True)
    return _keep(scores, probs >= least)


def _keep(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, scores, -torch.inf)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
