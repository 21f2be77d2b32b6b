"""From rows to an outcome: law, then acceptance, off the event loop."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from orchestrator.acceptance import Outcome, accept
from orchestrator.drafting import Proposal
from orchestrator.request import GenerationPlan
from orchestrator.stats import RoundStats, micros_since
from outrider.law.noise import RoundNoise
from outrider.law.sparse import Int32Array
from outrider.law.transforms import NonFiniteLogits, RowContext, law_probs
from outrider.net.errors import OutriderError
from outrider.v1 import types_pb2


def decide(plan: GenerationPlan, tokens: Int32Array, proposal: Proposal, logits: torch.Tensor) -> Outcome:
    """The outcome of a round. A pure function of its arguments.

    Args:
        plan: law, seed and acceptance rule.
        tokens: [base_length] int32, all committed tokens.
        proposal: the block.
        logits: [lookahead + 1, vocab_size] float32.

    Raises OutriderError(NON_FINITE_LOGITS) when a row has no law.
    """
    whole = np.concatenate([tokens, proposal.tokens])
    base_length = len(tokens)
    contexts = [RowContext(plan.law, whole[: base_length + row]) for row in range(len(proposal.tokens) + 1)]
    try:
        target_probs = law_probs(logits, contexts, logits.shape[1]).numpy()
    except NonFiniteLogits as error:
        raise OutriderError(types_pb2.ERROR_REASON_NON_FINITE_LOGITS, f"the target's logits: {error}") from error
    return accept(plan.acceptance, proposal.tokens, proposal.law, target_probs, RoundNoise(plan.seed, base_length))


class Judge:
    """Runs `decide` on a thread of its own, so that the event loop never waits for arithmetic."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def outcome(
        self, plan: GenerationPlan, tokens: Int32Array, proposal: Proposal, logits: torch.Tensor, stats: RoundStats
    ) -> Outcome:
        """`decide`, with its time in the statistics."""
        start = time.perf_counter()
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._thread, decide, plan, tokens, proposal, logits)
        stats.accept_micros = micros_since(start)
        return outcome

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
