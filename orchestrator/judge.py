"""From rows to an outcome: the law where rows are dense, then acceptance."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from orchestrator.acceptance import BY_LAW, Block, Outcome, accept, accept_each
from orchestrator.logprobs import TokenLogprobs, of_logits, of_round
from orchestrator.proposal import Proposal
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats, micros_since
from orchestrator.turn import Turn
from orchestrator.verifying import Rows, Verified
from outrider.law.answer import Answer, Question, answer
from outrider.law.batch import ENTRIES_PER_CALL
from outrider.law.noise import RoundNoise
from outrider.law.rows import SupportRows
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
        noise = RoundNoise(plan.seed, len(tokens))
        return accept(plan.acceptance, proposal.tokens, proposal.law, compact, noise, proposal.tree)
    except ValueError as error:
        raise _no_progress(error) from error


def _answer(
    plan: GenerationPlan,
    tokens: Int32Array,
    proposal: Proposal,
    logits: torch.Tensor,
    grammar: SessionGrammar | None,
) -> Answer:
    """What the target would have made of its logits [lookahead + 1, vocab_size]."""
    whole = np.concatenate([tokens, proposal.tokens])
    question = Question(
        plan.law,
        RoundNoise(plan.seed, len(tokens)),
        whole,
        None if plan.judged_by_token else (proposal.law.sizes, proposal.law.token_ids),
        grammar.masks(whole, len(tokens), proposal.tree) if grammar is not None else None,
        proposal.tree,
    )
    (made,) = answer([(logits, question)], logits.shape[1])
    if made is None:
        message = f"after {len(tokens)} tokens the target's logits are no law: NaN, infinite, or nothing left to draw"
        raise OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, message)
    return made


def logprobs_of(plan: GenerationPlan, proposal: Proposal, outcome: Outcome, verified: Verified) -> list[TokenLogprobs]:
    """What the model thought of each token of a round; nothing where the plan does not ask."""
    if plan.logprobs is None:
        return []
    tokens = np.append(outcome.kept(proposal.tokens), np.int32(outcome.token))
    if isinstance(verified.rows, torch.Tensor):
        return of_logits(tokens, verified.rows[outcome.rows], plan.logprobs)
    if verified.logprobs is None:
        raise ValueError("the answer lacks the log probabilities that the plan asks for")
    return of_round(tokens, proposal.law, verified.logprobs, outcome.rows)


class Judge:
    """Runs `decide`: dense rows on a thread of its own, so that the event loop never waits for them; SUPPORT rows that
    came at the same moment in one call; the target's own tokens, and the draw of a round without a block, at once.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._together = {
            rule: Turn(partial(accept_each, rule), lambda block: len(block.law.token_ids), ENTRIES_PER_CALL)
            for rule in BY_LAW
        }

    async def outcome(
        self,
        plan: GenerationPlan,
        tokens: Int32Array,
        proposal: Proposal,
        verified: Verified,
        stats: RoundStats,
        grammar: SessionGrammar | None = None,
    ) -> tuple[Outcome, list[TokenLogprobs]]:
        """`decide` and `logprobs_of`, with their time in the statistics."""
        start = stats.begins("accept")
        if isinstance(verified.rows, torch.Tensor):
            loop = asyncio.get_running_loop()
            judged = await loop.run_in_executor(self._thread, _judge, plan, tokens, proposal, verified, grammar)
        elif isinstance(verified.rows, SupportRows) and len(proposal.tokens) and plan.acceptance in self._together:
            block = Block(
                proposal.tokens, proposal.law, verified.rows, RoundNoise(plan.seed, len(tokens)), proposal.tree
            )
            try:
                outcome = await self._together[plan.acceptance].result(block)
            except ValueError as error:
                raise _no_progress(error) from error
            judged = outcome, logprobs_of(plan, proposal, outcome, verified)
        else:
            judged = _judge(plan, tokens, proposal, verified, grammar)
        stats.accept_micros = micros_since(start)
        return judged

    def close(self) -> None:
        """Ends what waits, and the thread."""
        for turn in self._together.values():
            turn.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _no_progress(error: ValueError) -> OutriderError:
    return OutriderError(types_pb2.ERROR_REASON_NO_PROGRESS, f"the target's rows: {error}")


def _judge(
    plan: GenerationPlan,
    tokens: Int32Array,
    proposal: Proposal,
    verified: Verified,
    grammar: SessionGrammar | None,
) -> tuple[Outcome, list[TokenLogprobs]]:
    outcome = decide(plan, tokens, proposal, verified.rows, grammar)
    return outcome, logprobs_of(plan, proposal, outcome, verified)
