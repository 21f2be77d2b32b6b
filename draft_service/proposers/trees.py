"""The next level of trees that grow from a model: its rows become laws, and candidates are drawn from these."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from draft_service.growth import Node, Row, chances_drawn
from draft_service.job import Job
from outrider.law.draft import point_mass, truncate
from outrider.law.masking import Words
from outrider.law.noise import Purpose
from outrider.law.params import LawParams
from outrider.law.race import scores
from outrider.law.transforms import NonFiniteLogits, RowContext, law_probs
from outrider.net.errors import OutriderError

Step = tuple[Job, torch.Tensor]


def draw_trees(steps: Sequence[Step], vocab_size: int, fail: Callable[[Job], None]) -> None:
    """Gives every tree its next level, and its session the nodes to be computed for the one after that.

    Args:
        steps: (job, logits [nodes of the level, vocab_size]).
        fail: told of a job with a row that is no law.
    """
    masks = [_masks(job) for job, _ in steps]
    contexts = [_contexts(job, allowed) for (job, _), allowed in zip(steps, masks, strict=True)]
    try:
        probs = law_probs(
            torch.cat([logits for _, logits in steps]), [it for each in contexts for it in each], vocab_size
        )
    except NonFiniteLogits as error:
        owners = np.repeat(np.arange(len(steps)), [len(logits) for _, logits in steps])
        bad = set(owners[error.rows].tolist())
        for index in bad:
            fail(steps[index][0])
        rest = [step for index, step in enumerate(steps) if index not in bad]
        if rest:
            draw_trees(rest, vocab_size, fail)
        return
    laws = torch.split(probs, [len(logits) for _, logits in steps])
    for (job, _), law, allowed in zip(steps, laws, masks, strict=True):
        _branch(job, law, allowed)
        _move_on(job)


# The tokens that may follow each node; None for a node that nothing follows, where the session has a language.
_Allowed = list[Words | None] | None


def _masks(job: Job) -> _Allowed:
    grammar, growth = job.session.grammar, job.growth
    assert growth is not None
    if grammar is None:
        return None
    allowed: list[Words | None] = []
    for node in growth.level:
        try:
            text = job.session.text(node.place)
            allowed.append(grammar.masks(text, len(text))[0])
        except OutriderError as error:
            allowed.append(None)
            if node.parent is None:
                job.failed = error
    return allowed


def _contexts(job: Job, allowed: _Allowed) -> list[RowContext]:
    growth, params = job.growth, _ranking(job.law.params)
    assert growth is not None
    masks = allowed or [None] * len(growth.level)
    return [RowContext(params, job.session.text(node.place), it) for node, it in zip(growth.level, masks, strict=True)]


def _ranking(params: LawParams) -> LawParams:
    """A greedy law says nothing of the second best; what it would be at temperature 1 does."""
    if not params.greedy:
        return params
    return replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def _branch(job: Job, laws: torch.Tensor, allowed: _Allowed) -> None:
    growth = job.growth
    assert growth is not None
    for index, (node, row) in enumerate(zip(growth.level, truncate(laws, job.law.top), strict=True)):
        if allowed is None or allowed[index] is not None:
            growth.branch(node, *_candidates(job, node, row))


def _candidates(job: Job, node: Node, row: Row) -> tuple[Row, list[int], Iterator[float]]:
    """(the law that they are drawn from, tokens in the order drawn, how likely each is kept)."""
    token_ids, probs = row
    if job.law.params.greedy:
        if job.law.omit_law:
            return row, token_ids.tolist(), iter(probs.tolist())
        best = int(token_ids[0])
        return point_mass(best), [best], iter([float(probs[0])])
    # COUPLE noise is the target's, which knows no branches.
    noise = job.noise if job.law.coupled else node.noise
    purpose = Purpose.COUPLE if job.law.coupled else Purpose.PROPOSE
    order = scores(probs, noise.exponentials(purpose, job.ask.base_length + node.depth, token_ids)).argsort(
        kind="stable"
    )
    return row, token_ids[order].tolist(), chances_drawn(probs[order].tolist())


def _move_on(job: Job) -> None:
    growth = job.growth
    assert growth is not None
    level = growth.next_level(job.law.params.stop_token_ids) if job.failed is None else []
    if not level:
        tokens, parents, job.rows = growth.result()
        job.tokens, job.done = tokens, True
        job.parents = None if (parents == np.arange(len(parents))).all() else parents
        return
    parents_of = [node.parent.place for node in level if node.parent is not None]
    for place, node in enumerate(level, job.session.length):
        node.place = place
    job.session.extend(np.array([node.token for node in level], np.int32), np.array(parents_of))
