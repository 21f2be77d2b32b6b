"""Speculative sampling: keep a draft token with probability min(1, target/draft), else draw from the residual law.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Chen et al. 2023.

Every row is divided by its float64 sum before it is used. The draft's race draws in proportion to the float32 numbers
shipped, whatever their sum, so a sum of 0.9999999 is no error as long as it is divided out: the output law is then the
target's to the last bits of float64.
"""

import numpy as np

from orchestrator.acceptance.outcome import Outcome, origin_after
from outrider.law.noise import Float64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Float32Array, Int32Array, SparseLaw

_NO_TOKENS = np.empty(0, dtype=np.int32)


def ratio(draft_tokens: Int32Array, draft_law: SparseLaw, target_probs: Float32Array, noise: RoundNoise) -> Outcome:
    """Accepts a prefix of the block and draws the token after it.

    Args:
        draft_tokens: [lookahead]; token i stands at position noise.base_length + i.
        draft_law: [lookahead] rows, the laws that the tokens were drawn from; audited.
        target_probs: [lookahead + 1, vocab_size].
        noise: of the round.

    Raises ValueError when shapes do not fit, a draft token has no draft probability, or a row is no law.
    """
    lookahead = len(draft_tokens)
    if len(draft_law.sizes) != lookahead or len(target_probs) != lookahead + 1:
        raise ValueError(
            f"{lookahead} draft tokens, {len(draft_law.sizes)} draft rows, {len(target_probs)} target rows"
        )
    for index, token in enumerate(draft_tokens.tolist()):
        token_ids, draft_row = draft_law.row(index)
        position = noise.base_length + index
        keep = keep_probability(token, token_ids, draft_row, target_probs[index])
        if noise.uniform(Purpose.ACCEPT, position) >= keep:
            weights = residual(target_probs[index], token_ids, draft_row)
            return Outcome(index, draw(weights, token_ids, noise, position), origin_after(index, lookahead))
    token = draw(target_probs[lookahead].astype(np.float64), _NO_TOKENS, noise, noise.base_length + lookahead)
    return Outcome(lookahead, token, origin_after(lookahead, lookahead))


def keep_probability(token: int, token_ids: Int32Array, draft_row: Float32Array, target_row: Float32Array) -> float:
    """min(1, target/draft) of a draft token. Raises ValueError when the draft cannot have drawn it."""
    drafted = float(draft_row[token_ids == token].sum(dtype=np.float64))
    if not drafted > 0:
        raise ValueError(f"draft token {token} has no draft probability")
    return min(1.0, (float(target_row[token]) / total(target_row)) / (drafted / total(draft_row)))


def residual(target_row: Float32Array, token_ids: Int32Array, draft_row: Float32Array) -> Float64Array:
    """max(target - draft, 0): [vocab_size] float64, not normalised.

    Where nothing is left the laws are equal up to rounding, and a rejection had probability 1e-16: the target's law.
    """
    target: Float64Array = target_row.astype(np.float64) / total(target_row)
    weights = target.copy()
    weights[token_ids] = np.maximum(target[token_ids] - draft_row.astype(np.float64) / total(draft_row), 0.0)
    return weights if weights.any() else target


def draw(weights: Float64Array, support: Int32Array, noise: RoundNoise, position: int) -> int:
    """A token in proportion to `weights` [vocab_size], by the RESAMPLE noise of the position.

    The tokens of the support race one by one, all others as one runner with the sum of their weights; if that one wins,
    an inverse distribution function says which of them it was. Equal in law to a race of all, with noise for few.
    Raises ValueError when there is no weight, or one is not finite.
    """
    runners = scores(weights[support], noise.exponentials(Purpose.RESAMPLE, position, support))
    exponential, uniform = noise.tail(Purpose.RESAMPLE, position)
    tail = weights.copy()
    tail[support] = 0.0
    mass = np.cumsum(tail)
    best = float(runners.min(initial=np.inf))
    if not np.isfinite(mass[-1]) or (mass[-1] <= 0 and best == np.inf):
        raise ValueError("a draw needs finite probabilities and one above zero")
    if mass[-1] <= 0 or best * mass[-1] <= exponential:
        return int(support[np.argmin(runners)])
    return int(np.searchsorted(mass, uniform * mass[-1], side="right"))


def total(row: Float32Array) -> float:
    """The row's sum in float64. Raises ValueError when it is not finite and positive."""
    result = float(row.sum(dtype=np.float64))
    if not 0 < result < np.inf:
        raise ValueError(f"probabilities sum to {result}")
    return result
