"""Sessions outlive their streams: cut anywhere, gone on with anywhere, and nothing shows of it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc
import pytest

from outrider.lm.synthetic_spec import SyntheticSpec
from outrider.net.arrays import int32s
from outrider.net.errors import from_rpc_error
from outrider.v1 import orchestrator_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.orchestrator_pb2 import (
    CancelSessionRequest,
    GenerateRequest,
    GetSessionRequest,
    GetSessionResponse,
    ResumeRequest,
    StopConditions,
)
from outrider.v1.types_pb2 import Grammar
from tests.harness.engines import DEADLINE
from tests.harness.faults import Client, HookedEngine, KeptStore, draft_engine, greedy_output, refused, target_engine
from tests.harness.orchestrator import Generation, RunningOrchestrator, ask, start_orchestrator
from tests.harness.workers import RunningDraft, RunningTarget, eventually, start_draft, start_target

PROMPT = (0, 1, 2)
LONG = 100_000
EOS = 15
LIKE = SyntheticSpec(vocab_size=16, order=2, eos=EOS, context_length=1 << 20)


@dataclass
class Replicas:
    """Two orchestrators over one store and the same workers."""

    store: KeptStore
    orchestrators: Sequence[RunningOrchestrator]
    target: RunningTarget
    draft: RunningDraft
    engine: HookedEngine = field(repr=False)

    async def state_of(self, session_id: str) -> GetSessionResponse:
        return await self.orchestrators[0].stub.GetSession(GetSessionRequest(session_id=session_id), timeout=DEADLINE)

    async def until_freed(self) -> None:
        """Returns when no service holds anything of any session."""
        for one in self.orchestrators:
            await eventually(lambda one=one: not one.core.sessions and not one.core._endings)
            assert all(link.sessions == 0 for link in (*one.core.targets.links, *one.core.drafts.links))
            assert all(not link._told for link in one.core.drafts.links)
            assert not len(one.servicer.running)
        await eventually(lambda: not self.target.service.load().open_sessions and not self.target.service.queued)
        await self.draft.until_sessions(0)


@asynccontextmanager
async def replicas(target: HookedEngine | None = None, draft: HookedEngine | None = None) -> AsyncIterator[Replicas]:
    store, engine = KeptStore(600), target or target_engine()
    settings = {"store": store, "draft_timeout": 30, "max_lookahead": 64}
    async with (
        start_target(engine) as running_target,
        start_draft(draft or draft_engine(), proposers="model,prompt_lookup") as running_draft,
        start_orchestrator([running_target.address], [running_draft.address], **settings) as one,
        start_orchestrator([running_target.address], [running_draft.address], **settings) as other,
    ):
        try:
            yield Replicas(store, [one, other], running_target, running_draft, engine)
        finally:
            engine.let_go()


def resumable(session_id: str, request: GenerateRequest | None = None, **fields: object) -> GenerateRequest:
    made = GenerateRequest()
    made.CopyFrom(request or ask(PROMPT, **fields))  # type: ignore[arg-type]
    made.session_id, made.resumable = session_id, True
    return made


async def with_cuts(system: Replicas, request: GenerateRequest, cuts: Sequence[int]) -> Generation:
    """The generation as a caller sees it who loses its stream after each of so many tokens, and goes elsewhere."""
    whole = Generation()
    client = Client(system.orchestrators[0], request)
    for number, cut in enumerate(cuts, start=1):
        # The orchestrator owns the session now, and not later, when another one does.
        await client.until(lambda seen: bool(seen.started.session_id))
        await client.until(partial(_reached, cut - len(whole.tokens)))
        client.cancel()
        whole.tokens += client.generation.tokens
        rest = ResumeRequest(session_id=request.session_id, offset=len(whole.tokens))
        client = Client(system.orchestrators[number % 2], rest)
    last = await client.finish()
    whole.tokens += last.tokens
    whole.started, whole.finish = last.started, last.finish
    return whole


def _reached(tokens: int, seen: Generation) -> bool:
    return len(seen.tokens) >= tokens or seen.finish.reason != pb.FINISH_REASON_UNSPECIFIED


def cuts(dice: random.Random, end: int) -> list[int]:
    return sorted(dice.sample(range(end), dice.randint(1, 4)))


RULES = [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"seed": 7}, id="coupled"),
    pytest.param({"seed": 7, "acceptance": pb.ACCEPTANCE_RATIO, "lookahead": 0}, id="ratio_plain"),
    # What a block is cut for does not matter to these either; the penalties count what came before the cut.
    pytest.param({"seed": 9, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_p": 0.01}, id="penalties"),
]


@pytest.mark.parametrize("fields", RULES)
async def test_g4_cut_anywhere_the_output_is_that_of_a_stream_that_was_not(fields: dict[str, object]) -> None:
    dice = random.Random(4)
    async with replicas() as system:
        reference = await system.orchestrators[0].generate(ask(PROMPT, max_tokens=60, **fields))
        for trial in range(8):
            request = resumable(f"cut-{trial}", max_tokens=60, **fields)
            cut = await with_cuts(system, request, cuts(dice, 60))
            assert (cut.ids, cut.text) == (reference.ids, reference.text)
            assert cut.finish.reason == pb.FINISH_REASON_LENGTH
            usage = cut.finish.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (3, 60)
            parts = (usage.accepted_tokens, usage.recovered_tokens, usage.bonus_tokens, usage.plain_tokens)
            assert sum(parts) + usage.replayed_tokens == 60
            assert (await system.state_of(request.session_id)).state == pb.SESSION_STATE_FINISHED
        await system.until_freed()


async def test_g4_ratio_goes_on_exactly_after_what_was_committed() -> None:
    """Its noise depends on where rounds begin, so that the rest may be another draw of the same law."""
    dice = random.Random(5)
    async with replicas() as system:
        for trial in range(10):
            request = resumable(f"cut-{trial}", max_tokens=50, acceptance=pb.ACCEPTANCE_RATIO)
            cut = await with_cuts(system, request, cuts(dice, 50))
            state = await system.state_of(request.session_id)
            assert cut.ids == int32s(state.generated_tokens, "generated_tokens").tolist()
            assert (len(cut.ids), cut.finish.usage.completion_tokens) == (50, 50)
            assert cut.text == "".join(chr(97 + token) for token in cut.ids)


async def test_g4_d4_stop_strings_and_min_tokens_go_on_after_the_cut() -> None:
    plain = "".join(chr(97 + token) for token in greedy_output(PROMPT, 40))
    stop = StopConditions(max_tokens=40, min_tokens=5, strings=[plain[18:23], plain[1:3]])
    expected = plain[: plain.find(plain[18:23], 5)]
    async with replicas() as system:
        reference = await system.orchestrators[0].generate(ask(PROMPT, temperature=0, stop=stop))
        assert reference.finish.reason == pb.FINISH_REASON_STOP
        assert reference.text.startswith(expected[:5])
        for at in range(len(reference.tokens)):
            request = resumable(f"cut-{at}", temperature=0, stop=stop)
            cut = await with_cuts(system, request, [at])
            assert (cut.ids, cut.text) == (reference.ids, reference.text)
            ends = [(one.finish.reason, one.finish.matched_stop) for one in (cut, reference)]
            assert ends[0] == ends[1]
            assert cut.finish.usage.completion_tokens == len(reference.tokens)


async def test_g5_a_grammar_goes_on_where_the_output_stands() -> None:
    request = ask(PROMPT, max_tokens=60, seed=3, lookahead=4)
    request.grammar.CopyFrom(Grammar(regex="([a-d]{3}e){5,}f"))
    engine, drafting = target_engine(LIKE), draft_engine(LIKE)
    async with replicas(engine, drafting) as system:
        reference = await system.orchestrators[0].generate(request)
        assert reference.finish.reason == pb.FINISH_REASON_STOP
        for at in range(0, len(reference.tokens), 3):
            cut = await with_cuts(system, resumable(f"cut-{at}", request), [at, at + 2])
            assert (cut.ids, cut.text) == (reference.ids, reference.text)


async def test_replayed_tokens_say_so_and_carry_no_log_probability() -> None:
    async with replicas() as system:
        request = resumable("cut", max_tokens=20, temperature=0)
        request.logprobs, request.token_by_token = 2, True
        client = Client(system.orchestrators[0], request)
        await client.until_tokens(10)
        client.cancel()
        again = Client(system.orchestrators[1], ResumeRequest(session_id="cut", offset=4))
        rest = await again.finish()
        committed = rest.started.committed_tokens
        assert committed >= 10
        assert rest.ids == greedy_output(PROMPT, 20)[4:]
        replayed, fresh = rest.tokens[: committed - 4], rest.tokens[committed - 4 :]
        assert {token.origin for token in replayed} == {pb.TOKEN_ORIGIN_REPLAYED}
        assert not any(token.HasField("logprob") or token.top_logprobs for token in replayed)
        assert pb.TOKEN_ORIGIN_REPLAYED not in {token.origin for token in fresh}
        assert all(token.HasField("logprob") and len(token.top_logprobs) == 2 for token in fresh)
        assert rest.finish.usage.replayed_tokens == committed


async def test_h1_a_resumable_session_whose_client_goes_stops_at_once_and_waits() -> None:
    async with replicas() as system:
        client = Client(system.orchestrators[0], resumable("left", max_tokens=LONG, temperature=0))
        await client.until_tokens(5)
        system.engine.hold()
        await system.engine.until_in_pass()
        passes = system.engine.passes
        client.cancel()
        await eventually(lambda: system.orchestrators[0].core.sessions == 0)
        system.engine.let_go()
        await system.until_freed()
        assert system.engine.passes == passes
        state = await system.state_of("left")
        assert (state.state, state.epoch) == (pb.SESSION_STATE_RUNNING, 1)


async def test_j7_a_resumable_session_moves_when_its_orchestrator_drains() -> None:
    async with replicas() as system:
        client = Client(system.orchestrators[0], resumable("moved", max_tokens=300, temperature=0))
        await client.until_tokens(5)
        await system.orchestrators[0].servicer.drain(0.0)
        await refused(client.finish(), "DRAINING", grpc.StatusCode.UNAVAILABLE)
        await refused(
            Client(system.orchestrators[0], ResumeRequest(session_id="moved")).finish(),
            "DRAINING",
            grpc.StatusCode.UNAVAILABLE,
        )
        seen = client.generation.ids
        rest = await Client(system.orchestrators[1], ResumeRequest(session_id="moved", offset=len(seen))).finish()
        assert seen + rest.ids == greedy_output(PROMPT, 300)
        await system.until_freed()


@pytest.mark.parametrize("new", [0, 1], ids=["same", "other"])
async def test_g11_a_former_owner_is_refused_and_says_so(new: int) -> None:
    async with replicas() as system:
        former = Client(system.orchestrators[0], resumable("taken", max_tokens=2000, temperature=0))
        await former.until_tokens(5)
        owner = Client(system.orchestrators[new], ResumeRequest(session_id="taken", offset=5))
        await owner.read()
        await refused(former.finish(), "STALE_EPOCH", grpc.StatusCode.ABORTED)
        expected = greedy_output(PROMPT, 2000)
        assert former.generation.ids == expected[: len(former.generation.ids)]
        assert (await owner.finish()).ids == expected[5:]
        assert (await system.state_of("taken")).epoch == 2
        await system.until_freed()


async def test_a_finished_session_is_replayed_without_work_or_a_new_owner() -> None:
    async with replicas() as system:
        first = await system.orchestrators[0].generate(resumable("done", max_tokens=30, seed=1))
        passes = system.engine.passes
        for offset in (0, 11, 30):
            again = await Client(system.orchestrators[1], ResumeRequest(session_id="done", offset=offset)).finish()
            assert again.ids == first.ids[offset:]
            assert again.started.committed_tokens == 30
            assert again.finish.reason == pb.FINISH_REASON_LENGTH
            assert (again.finish.usage.completion_tokens, again.finish.usage.replayed_tokens) == (30, 30)
        assert system.engine.passes == passes
        assert (await system.state_of("done")).epoch == 1


async def test_what_cannot_be_resumed_is_refused() -> None:
    async with replicas() as system:
        other = system.orchestrators[1]
        await system.orchestrators[0].generate(resumable("done", max_tokens=9))
        beyond = Client(other, ResumeRequest(session_id="done", offset=10)).finish()
        error = await refused(beyond, "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
        assert error.message == "offset is 10, must be in [0, 9]"
        unknown = Client(other, ResumeRequest(session_id="nobody")).finish()
        await refused(unknown, "SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
        nonsense = Client(other, ResumeRequest(session_id="a b")).finish()
        await refused(nonsense, "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
        several = resumable("several")
        several.n = 2
        error = await refused(other.generate(several), "INVALID_FIELD", grpc.StatusCode.INVALID_ARGUMENT)
        assert error.message.startswith("n is 2, must be 0 or 1 with resumable")


async def test_cancel_session_ends_one_that_nobody_runs() -> None:
    async with replicas() as system:
        client = Client(system.orchestrators[0], resumable("orphan", max_tokens=LONG, temperature=0))
        await client.until_tokens(5)
        client.cancel()
        await system.until_freed()
        await system.orchestrators[1].stub.CancelSession(CancelSessionRequest(session_id="orphan"), timeout=DEADLINE)
        state = await system.state_of("orphan")
        assert (state.state, state.finish_reason) == (pb.SESSION_STATE_FINISHED, pb.FINISH_REASON_CANCELLED)
        again = await Client(system.orchestrators[1], ResumeRequest(session_id="orphan", offset=5)).finish()
        assert again.finish.reason == pb.FINISH_REASON_CANCELLED
        committed = int32s(state.generated_tokens, "generated_tokens").tolist()
        assert again.ids == committed[5:]


async def test_cancel_session_of_a_resumable_stream_ends_it() -> None:
    async with replicas() as system:
        clients = [Client(one, resumable(f"s{i}", max_tokens=LONG)) for i, one in enumerate(system.orchestrators)]
        for index, client in enumerate(clients):
            await client.until_tokens(5)
            request = CancelSessionRequest(session_id=f"s{index}")
            await system.orchestrators[0].stub.CancelSession(request, timeout=DEADLINE)
            await refused(client.finish(), "SESSION_CANCELLED", grpc.StatusCode.ABORTED)
            assert (await system.state_of(f"s{index}")).finish_reason == pb.FINISH_REASON_CANCELLED
        await system.until_freed()


async def test_generate_of_the_same_words_under_the_same_id_is_one_generation() -> None:
    async with replicas() as system:
        request = resumable("once", max_tokens=40)
        first = Client(system.orchestrators[0], request)
        await first.until_tokens(5)
        first.cancel()
        # No seed was chosen: the session has one, and keeps it.
        again = await system.orchestrators[1].generate(request)
        assert again.started.seed == first.generation.started.seed
        assert again.ids[: len(first.generation.ids)] == first.generation.ids
        assert len(again.ids) == 40
        once_more = await system.orchestrators[0].generate(request)
        assert (once_more.ids, once_more.text) == (again.ids, again.text)
        for changed in ("max_tokens", "prompt", "resumable", "seed"):
            other = GenerateRequest()
            other.CopyFrom(request)
            if changed == "max_tokens":
                other.stop.max_tokens = 41
            elif changed == "prompt":
                other.token_ids.ids.append(3)
            elif changed == "seed":
                other.seed = (again.started.seed + 1) % 2**64
            else:
                other.resumable = False
            await refused(system.orchestrators[1].generate(other), "SESSION_EXISTS", grpc.StatusCode.ALREADY_EXISTS)


@pytest.mark.parametrize("other_seed", [2, 1], ids=["another", "the_same"])
async def test_g2_two_orchestrators_asked_for_one_id_at_once_make_one_generation_of_it(
    other_seed: int,
) -> None:
    """The store knows one session of an id, whoever asks: the others are refused, or read the same tokens."""
    async with replicas() as system:
        for trial in range(5):
            requests = [resumable(f"id-{trial}", max_tokens=30, seed=seed) for seed in (1, other_seed)]
            calls = [Client(*each) for each in zip(system.orchestrators, requests, strict=True)]
            outcomes = await asyncio.gather(*(call.finish() for call in calls), return_exceptions=True)
            state = await system.state_of(f"id-{trial}")
            committed = int32s(state.generated_tokens, "generated_tokens").tolist()
            finished = [one for one in outcomes if isinstance(one, Generation)]
            assert finished
            assert all(one.ids == committed for one in finished)
            reasons = [from_rpc_error(one) for one in outcomes if isinstance(one, grpc.aio.AioRpcError)]
            refusal = types_pb2.ERROR_REASON_SESSION_EXISTS if other_seed == 2 else types_pb2.ERROR_REASON_STALE_EPOCH
            assert all(one is not None and one.reason == refusal for one in reasons)
        await system.until_freed()


async def test_of_many_that_resume_at_once_the_last_owner_finishes() -> None:
    async with replicas() as system:
        first = Client(system.orchestrators[0], resumable("popular", max_tokens=200, temperature=0))
        await first.until_tokens(3)
        rest = [Client(system.orchestrators[i % 2], ResumeRequest(session_id="popular")) for i in range(6)]
        outcomes = await asyncio.gather(*(each.finish() for each in rest), return_exceptions=True)
        expected = greedy_output(PROMPT, 200)
        for client, outcome in zip(rest, outcomes, strict=True):
            assert client.generation.ids == expected[: len(client.generation.ids)]
            assert isinstance(outcome, grpc.aio.AioRpcError) or outcome.ids == expected
        last = await Client(system.orchestrators[0], ResumeRequest(session_id="popular")).finish()
        assert last.ids == expected
        first.cancel()
        await system.until_freed()


async def test_l6_a_damaged_request_in_the_store_is_an_error_of_its_own() -> None:
    async with replicas() as system:
        await system.orchestrators[0].generate(resumable("damaged"))
        record = system.store._records["damaged"]
        object.__setattr__(record, "meta", b"\xff\xff")
        damaged = Client(system.orchestrators[1], ResumeRequest(session_id="damaged")).finish()
        await refused(damaged, "SESSION_CORRUPT")
