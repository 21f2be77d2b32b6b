"""Which outcomes of a round are likeliest after the one that a block is accepted whole, with the guess after it."""

from collections.abc import Iterator

import numpy as np

from draft_service.job import Job
from outrider.law.noise import Float64Array, Purpose, RoundNoise
from outrider.law.race import scores
from outrider.law.sparse import Float32Array, Int32Array


def other_outcomes(job: Job) -> list[tuple[int, int]]:
    """(accepted tokens, token after them) of a finished block's round, likeliest first; each count at most once.

    The acceptance rule's noise is known here, the target's law is not: the draft's own stands for it.
    """
    found = sorted(_rivals(job), reverse=True)
    return [(accepted, token) for _, accepted, token in found if token not in job.law.params.stop_token_ids]


def _rivals(job: Job) -> Iterator[tuple[float, int, int]]:
    """(how near it is to being the outcome, accepted tokens, token after them)."""
    guess = job.bonus
    tokens, rows, runners_up = job.tokens, job.rows, job.runners_up
    if guess is not None:
        tokens, rows = [*tokens, *guess.tokens], [*rows, *guess.rows]
        runners_up = [*runners_up, *guess.runners_up]
    if runners_up:
        yield from ((nearness, accepted, token) for accepted, (token, nearness) in enumerate(runners_up))
        return
    for accepted, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if len(row[0]) > 1:
            yield _rival(job, accepted, token, row)


def _rival(job: Job, accepted: int, token: int, row: tuple[Int32Array, Float32Array]) -> tuple[float, int, int]:
    token_ids, probs = row
    position, noise = job.ask.base_length + accepted, job.noise
    purpose = Purpose.COUPLE if job.law.coupled else Purpose.RESAMPLE
    race = scores(probs, noise.exponentials(purpose, position, token_ids))
    rivals = np.where(token_ids == token, np.inf, race)
    best = int(np.argmin(rivals))
    return _nearness(job, noise, position, race, rivals), accepted, int(token_ids[best])


def _nearness(job: Job, noise: RoundNoise, position: int, race: Float64Array, rivals: Float64Array) -> float:
    if job.law.coupled:
        # Both run in the same race: the nearer the second was, the likelier it is the target's first.
        return float(race.min() / rivals.min())
    # A token is rejected where the target's probability over the draft's is below this.
    return noise.uniform(Purpose.ACCEPT, position)
