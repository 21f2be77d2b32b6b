"""What three processes export is what the catalogue lists, and it adds up (FAILURES I1, I2, I4); their JSON logs."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from outrider.observe.catalogue import CATALOGUE, PROCESS_METRICS, TARGET_INFO, Service, of
from outrider.v1 import orchestrator_pb2
from outrider.v1.orchestrator_pb2 import StopConditions
from tests.harness.exporting import generate, service
from tests.harness.orchestrator import Generation, ask
from tests.harness.scrape import Scrape, until

MODEL = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5"
# A draft that is right now and then, and a target that keeps time enough to draft ahead.
DRAFT = "synthetic:vocab_size=26,seed=5,order=2,scale=2.5,agree=0.7"
LOG_KEYS = {"ts", "level", "logger", "message"}


def families(service: Service) -> dict[str, str]:
    """What a service must export, as Scrape has it: all of it that is its own."""
    return {instrument.prometheus_name: instrument.kind for instrument in of(service).values()}


def own(seen: Scrape) -> dict[str, str]:
    """What it exports of its own."""
    return {name: kind for name, kind in seen.families.items() if name not in (*PROCESS_METRICS, TARGET_INFO)}


async def test_three_processes_export_what_is_listed_and_it_adds_up() -> None:
    async with AsyncExitStack() as stack:
        target, draft = await asyncio.gather(
            stack.enter_async_context(service("target_service", "--model", MODEL)),
            stack.enter_async_context(service("draft_service", "--model", DRAFT)),
        )
        workers = ("--targets", target.address, "--drafts", draft.address, "--lookahead", "4", "--draft-timeout", "30")
        orchestrator = await stack.enter_async_context(service("orchestrator", "--tokenizer", MODEL, *workers))
        for process in (target, draft, orchestrator):
            (await process.seen()).check_numbers()
        await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", state="ready") == 2)

        # Without blocks first: nothing is divided by what there is none of.
        plain = await generate(orchestrator.address, [ask(max_tokens=5, lookahead=0, seed=1)])
        seen = await orchestrator.seen()
        seen.check_numbers()
        assert seen.sum("outrider_rounds_total", reason="DISABLED") == len(plain[0].rounds) == 5
        assert seen.sum("outrider_draft_tokens_total") == 0

        stop = StopConditions(token_ids=[3], max_tokens=40)
        requests = [ask([one, 2, 4], max_tokens=40, seed=one, stop=stop, session_id=f"name-{one}") for one in range(12)]
        generations = plain + await generate(orchestrator.address, requests)
        idle = await until(draft.metrics, lambda seen: seen.sum("outrider_draft_sessions") == 0)
        idle.check_numbers()
        seen = await orchestrator.seen()
        check_rounds(seen, generations)
        verified = await target.seen()
        verified.check_numbers()
        assert verified.sum("outrider_target_answers_total", reason="OK") == seen.sum("outrider_rounds_total")
        assert verified.sum("outrider_target_queue_time_seconds_count") == seen.sum("outrider_rounds_total")
        passes = verified.sum("outrider_target_passes_total")
        for name in ("pass_time_seconds", "pass_items", "pass_fullness"):
            assert verified.sum(f"outrider_target_{name}_count") == passes > 0
        assert idle.sum("outrider_draft_shipped_tokens_total") >= seen.sum("outrider_draft_tokens_total")
        assert own(seen) == families("orchestrator")
        assert own(verified) == families("target")
        assert own(idle) == families("draft")
        for exported in (seen, verified, idle):
            check_labels(exported)
            assert set(PROCESS_METRICS) <= exported.families.keys()

        await draft.ended()
        gone = {"pool": "draft", "state": "unavailable"}
        seen = await until(orchestrator.metrics, lambda seen: seen.sum("outrider_workers", **gone) == 1)
        assert seen.sum("outrider_workers", state="ready") == 1
        assert seen.sum("outrider_awaited_blocks") == 0
        for process in (orchestrator, target):
            await process.ended()
        for record in (record for process in (target, draft, orchestrator) for record in process.logs):
            assert record.keys() >= LOG_KEYS


def check_rounds(seen: Scrape, generations: Sequence[Generation]) -> None:
    """The counters of an orchestrator are the sums of what its clients were told."""
    seen.check_numbers()
    rounds = [one for generation in generations for one in generation.rounds]
    drafted, accepted = sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)
    emitted = sum(len(generation.tokens) for generation in generations)
    assert seen.sum("outrider_rounds_total") == len(rounds)
    assert seen.sum("outrider_drafts_total") == sum(one.drafted > 0 for one in rounds)
    assert seen.sum("outrider_draft_tokens_total") == drafted > accepted > 0
    assert seen.sum("outrider_accepted_tokens_total") == accepted
    assert seen.sum("outrider_draft_tokens_by_position_total") == drafted
    assert seen.sum("outrider_accepted_tokens_by_position_total") == accepted
    assert seen.sum("outrider_lookahead_sum") == drafted
    assert seen.sum("outrider_emitted_tokens_total") == emitted
    assert emitted == accepted + len(rounds) - seen.sum("outrider_trimmed_tokens_total")
    origins = [token.origin for generation in generations for token in generation.tokens]
    for name in ("ACCEPTED", "RECOVERED", "BONUS", "PLAIN"):
        expected = origins.count(orchestrator_pb2.TokenOrigin.Value(f"TOKEN_ORIGIN_{name}"))
        assert seen.sum("outrider_emitted_tokens_total", origin=name) == expected
    for part in ("draft_wait", "draft_forward", "verify", "verify_queue", "target_forward", "accept", "commit"):
        assert seen.sum(f"outrider_round_{part}_seconds_count") == len(rounds)
    assert seen.sum("outrider_round_batch_wait_seconds_count") == len(rounds)
    assert seen.sum("outrider_round_verify_seconds_sum") >= seen.sum("outrider_round_target_forward_seconds_sum") > 0
    assert seen.sum("outrider_store_duration_seconds_count", operation="commit") == len(rounds)
    requests = len(generations)
    assert seen.sum("gen_ai_server_request_duration_seconds_count", error_type="") == requests
    assert seen.sum("gen_ai_server_time_to_first_token_seconds_count") == requests
    assert seen.sum("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == emitted
    assert seen.sum("outrider_tenant_tokens_total", tenant="other") == emitted
    assert seen.sum("outrider_running_sessions") == seen.sum("outrider_verify_in_flight") == 0


def check_labels(seen: Scrape) -> None:
    """No label has a value that the catalogue does not list, where it lists them."""
    for label in {label for instrument in CATALOGUE for label in instrument.labels if not label.bound}:
        listed = {
            value
            for instrument in CATALOGUE
            for other in instrument.labels
            if other.prometheus_name == label.prometheus_name
            for value in other.values
        }
        assert seen.values_of(label.prometheus_name) <= listed
    assert "name-" not in seen.text
