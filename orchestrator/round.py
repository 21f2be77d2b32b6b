"""One round of one session: draft, verify, accept, commit, emit. The table of contents of the system."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from orchestrator.acceptance import Outcome
from orchestrator.feeding import committed
from orchestrator.judge import Judge
from orchestrator.logprobs import TokenLogprobs
from orchestrator.metrics import Metrics
from orchestrator.proposal import Proposal
from orchestrator.session import Scored, Session
from orchestrator.stats import RoundStats, micros_since
from orchestrator.store.base import SessionStore
from orchestrator.text.output import Emission, Kept, RoundToken
from outrider.v1.orchestrator_pb2 import TOKEN_ORIGIN_ACCEPTED

# Turns of the loop that a Verify takes to leave. The commit's write would delay it by some 0.3 ms.
_TURNS = 2


@dataclass(frozen=True)
class Services:
    """What a round needs beside its session."""

    judge: Judge
    store: SessionStore
    metrics: Metrics


async def run_round(session: Session, services: Services) -> tuple[Emission, RoundStats]:
    """Runs one round and returns what the client may see of it.

    Nothing is returned that is not committed: when anything before the commit fails, the round did not happen. At least
    one token is committed. Raises OutriderError.
    """
    proposal, verified, stats = await (session.take_ahead() or scored(session))  # draft, verify
    plan, tokens, grammar = session.plan, session.tokens.view(), session.grammar
    outcome, logprobs = await services.judge.outcome(plan, tokens, proposal, verified, stats, grammar)  # accept
    kept = session.output.keep(round_tokens(proposal, outcome, logprobs))
    session.check(kept)
    record(proposal, outcome, stats)
    session.drafting.fed(committed(verified.features, stats.base_length, outcome))
    session.advance(kept, stats)  # asks for the next block, to be drafted while the store writes
    if kept.finish is None:
        await score_ahead(session)  # the next round's draft and verify meanwhile: dropped when the commit fails
    await commit(session, kept, services.store, stats)

    session.count(stats)
    if session.trace is not None:
        session.trace.committed(stats, kept, outcome.origin)
    services.metrics.round(stats, len(kept.tokens), plan.acceptance, outcome.origin)
    return session.output.emit(kept), stats  # emit


async def score_ahead(session: Session) -> None:
    """Begins the next round before this one is committed; a Verify that waits for no block leaves before that, too."""
    session.ahead = asyncio.create_task(scored(session))
    for _ in range(_TURNS if session.drafting.ready else 0):
        await asyncio.sleep(0)


async def scored(session: Session) -> Scored:
    """The block of a round and what the target says about it. Raises OutriderError."""
    stats = session.trace.stats(session.base_length) if session.trace is not None else RoundStats(session.base_length)
    proposal = await session.drafting.block(stats)
    wanted = session.drafting.wanted(session.base_length)
    proposal, verified = await session.verifying.rows(session.tokens, proposal, stats, wanted)
    return proposal, verified, stats


def round_tokens(proposal: Proposal, outcome: Outcome, logprobs: Sequence[TokenLogprobs] = ()) -> list[RoundToken]:
    """The round's tokens in order: accepted ones, then the one that the target drew; with the log probability of each,
    or of none."""
    tokens = [(int(token), TOKEN_ORIGIN_ACCEPTED) for token in outcome.kept(proposal.tokens)]
    tokens.append((outcome.token, outcome.origin))
    return [RoundToken(token, origin, each) for (token, origin), each in zip_longest(tokens, logprobs)]


async def commit(session: Session, kept: Kept, store: SessionStore, stats: RoundStats) -> None:
    """Appends the round's tokens to the stored session, fenced by epoch and base length."""
    start = stats.begins("commit")
    reason = kept.finish.reason if kept.finish else 0
    await store.commit(session.plan.session_id, session.epoch, stats.base_length, kept.tokens, finish_reason=reason)
    stats.commit_micros = micros_since(start)


def record(proposal: Proposal, outcome: Outcome, stats: RoundStats) -> None:
    """Only what was verified counts as drafted."""
    stats.drafted = len(proposal.tokens)
    stats.accepted = outcome.accepted
    stats.tree_depth = proposal.tree.depth if proposal.tree is not None else 0
    stats.drafted_ahead = min(stats.drafted_ahead, stats.drafted)
    stats.plain_reason = proposal.reason
