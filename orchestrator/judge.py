"""From rows to an outcome: the law where rows are dense, then acceptance."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from orchestrator.acceptance import Outcome, accept
from orchestrator.drafting import Proposal
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats, micros_since
from orchestrator.verifying import Rows
from outrider.law.answer import Answer, Question, answer
from outrider.law.noise import RoundNoise
from outrider.law.sparse import Int32Array
from outrider.lm.grammars import SessionGrammar
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2


def decide(
    plan: GenerationPlan,
    tokens: Int32Array,
    proposal: Proposal,
    rows: Rows,
    grammar: SessionGrammar | None = None,
) -> Outcome:
    """The outcome of a round. A pure function of its arguments, and the same for dense rows and those of the rule.

    Args:
        plan: law, seed and acceptance rule.
        tokens: [base_length] int32, all committed tokens.
        proposal: the block.
        rows: what the target says about it.
        grammar: of the session; its state is a function of the tokens.

    Raises OutriderError: NON_FINITE_LOGITS when a row of logits is no law, NO_PROGRESS when other rows are none.
    """
    compact = _answer(plan, tokens, proposal, rows, grammar) if isinstance(rows, torch.Tensor) else rows
    try:
        return accept(plan.acceptance, proposal.tokens, proposal.law, compact, RoundNoise(plan.seed, len(tokens)))
    except ValueError as error:
        raise OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, f"the target's rows: {error}") from error


def _answer(
    plan: GenerationPlan,
    tokens: Int32Array,
    proposal: Proposal,
    logits: torch.Tensor,
    grammar: SessionGrammar | None,
) -> Answer:
    """What the target would have made of its logits [lookahead + 1, vocab_size]."""
    path = np.concatenate([tokens, proposal.tokens])
    question = Question(
        plan.law,
        RoundNoise(plan.seed, len(tokens)),
        path,
        None if plan.judged_by_token else (proposal.law.sizes, proposal.law.token_ids),
        grammar.masks(path, len(tokens)) if grammar is not None else None,
    )
    (made,) = answer([(logits, question)], logits.shape[1])
    if made is None:
        message = f"the target returned NaN or infinite logits after {len(tokens)} tokens"
        raise OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, message)
    return made


class Judge:
    """Runs `decide`: dense rows on a thread of its own, so that the event loop never waits for them; others at once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def outcome(
        self,
        plan: GenerationPlan,
        tokens: Int32Array,
        proposal: Proposal,
        rows: Rows,
        stats: RoundStats,
        grammar: SessionGrammar | None = None,
    ) -> Outcome:
        """`decide`, with its time in the statistics."""
        start = time.perf_counter()
        if isinstance(rows, torch.Tensor):
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._thread, decide, plan, tokens, proposal, rows, grammar)
        else:
            outcome = decide(plan, tokens, proposal, rows, grammar)
        stats.accept_micros = micros_since(start)
        return outcome

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
