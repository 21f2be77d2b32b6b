"""G2: orchestrators that share workers and no store: what one calls a session is not what the other calls so."""

import asyncio

from tests.harness.faults import draft_engine, target_engine
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.workers import eventually, start_draft, start_target

PROMPT = (0, 1, 2)


async def test_g2_the_same_id_at_two_orchestrators_is_two_sessions_at_the_workers() -> None:
    async with start_target(target_engine()) as target, start_draft(draft_engine()) as draft:
        workers = ([target.address], [draft.address])
        async with start_orchestrator(*workers) as one, start_orchestrator(*workers) as other:
            alone = [await one.generate(ask(PROMPT, max_tokens=60, seed=seed)) for seed in (1, 2)]
            for trial in range(5):
                requests = [ask(PROMPT, max_tokens=60, seed=seed, session_id=f"same-{trial}") for seed in (1, 2)]
                together = await asyncio.gather(one.generate(requests[0]), other.generate(requests[1]))
                assert [each.ids for each in together] == [each.ids for each in alone]
            await eventually(lambda: not target.service.load().open_sessions)
