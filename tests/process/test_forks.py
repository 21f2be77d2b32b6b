"""J10: nothing of ours is forked, and processes that are started beside live channels do not hang."""

import asyncio
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

from outrider.lm.tokenizer import load_tokenizer
from tests.harness.faults import greedy_output, target_engine
from tests.harness.orchestrator import ask, start_orchestrator
from tests.harness.processes import ROOT
from tests.harness.workers import start_target

PACKAGES = ("outrider", "orchestrator", "draft_service", "target_service")
PROMPT = (1, 2, 3)
SECONDS = 60.0


def test_j10_no_package_of_ours_forks() -> None:
    forks = re.compile(r"os\.fork|multiprocessing|ProcessPoolExecutor|preexec_fn")
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if forks.search(path.read_text(encoding="utf-8"))] == []


def ids_of(text: str) -> list[int]:
    """In another process."""
    return list(load_tokenizer("synthetic:vocab_size=26").encode(text))


async def test_j10_tokenizing_in_a_spawned_process_beside_live_channels() -> None:
    async with start_target(target_engine()) as target, start_orchestrator([target.address]) as orchestrator:
        running = asyncio.ensure_future(orchestrator.generate(ask(PROMPT, max_tokens=400, temperature=0)))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            work = asyncio.get_running_loop().run_in_executor(pool, ids_of, "abcba")
            there = await asyncio.wait_for(work, SECONDS)
        assert there == ids_of("abcba")
        assert (await running).ids == greedy_output(PROMPT, 400)
        assert (await orchestrator.generate(ask(PROMPT, temperature=0))).ids == greedy_output(PROMPT, 20)
