import asyncio
import os
import signal
import sys

import pytest

from outrider.cli.health import until_serving
from outrider.cli.lines import Line
from outrider.cli.supervise import Command, NotReady, ProcessDied, Supervisor
from tests.harness.commands import SECONDS
from tests.harness.processes import ROOT, children_of, fake, runs, until_gone

SUPERVISING = """
import asyncio, sys
from outrider.cli.run import run
from outrider.cli.supervise import Supervisor
from tests.harness.processes import fake

async def main():
    async with Supervisor(grace=2) as supervisor:
        for flags in sys.argv[1:]:
            child = await supervisor.start(fake("fake", *flags.split()))
            await supervisor.announced(child, 120)
        print("up", flush=True)
        await supervisor.until_death()

run(main(), interrupted=7)
"""


async def supervising(*flags: str) -> asyncio.subprocess.Process:
    """A process that supervises one fake for each of `flags`, all of them announced."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SUPERVISING, *flags), cwd=ROOT, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), SECONDS) == b"up\n"
    return process


async def test_children_serve_and_end_in_order() -> None:
    async with Supervisor(grace=60) as supervisor:
        children = [await supervisor.start(fake(name, "--load-seconds", "0.2")) for name in ("first", "second")]
        for child in children:
            address = await supervisor.announced(child, SECONDS)
            await supervisor.guard(until_serving(child.command.name, address, SECONDS))
    assert [child.ended.result() for child in children] == [0, 0]
    assert not any(runs(child.pid) for child in children)


async def test_startup_error_is_quoted() -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(fake("target", "--fail", "model file x.gguf does not exist"))
        with pytest.raises(ProcessDied, match=r"^target stopped with exit code 2: model file x.gguf does not exist$"):
            await supervisor.announced(child, SECONDS)


async def test_death_interrupts_what_is_guarded_and_ends_the_others() -> None:
    async with Supervisor(grace=60) as supervisor:
        children = [await supervisor.start(fake(name)) for name in ("target", "draft")]
        for child in children:
            await supervisor.announced(child, SECONDS)
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        asyncio.get_running_loop().call_later(0.1, os.kill, children[1].pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match=r"^draft was killed by SIGKILL"):
            await asyncio.wait_for(supervisor.guard(work()), SECONDS)
        assert cancelled.is_set()
    await until_gone(*(child.pid for child in children))


async def test_failure_that_a_death_caused_is_told_as_the_death() -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(fake("target"))
        await supervisor.announced(child, SECONDS)

        async def fails_first() -> None:
            os.kill(child.pid, signal.SIGKILL)
            raise ConnectionError

        with pytest.raises(ProcessDied, match=r"^target"):
            await supervisor.guard(fails_first())


async def test_own_failure_of_guarded_work_passes() -> None:
    async with Supervisor() as supervisor:
        await supervisor.start(fake("target"))

        async def fails() -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await supervisor.guard(fails())


async def test_stubborn_child_is_killed_after_the_grace() -> None:
    deaf = asyncio.Event()
    async with Supervisor(grace=0.2, log=lambda name, line: deaf.set() if line.text == "deaf" else None) as supervisor:
        child = await supervisor.start(fake("stubborn", "--stubborn"))
        await asyncio.wait_for(deaf.wait(), SECONDS)
    assert child.ended.result() == -signal.SIGKILL


async def test_what_a_child_needs_is_there_until_it_has_ended() -> None:
    async with Supervisor(grace=60) as supervisor:
        store, service = [await supervisor.start(fake(name)) for name in ("store", "service")]
        for child in (store, service):
            await supervisor.announced(child, SECONDS)
        told: list[str] = []
        for child in (store, service):
            send = child.signal
            child.signal = lambda number, it=child, send=send: (
                told.append(  # type: ignore[method-assign,misc]
                    f"{it.command.name} {number.name}" + (" alone" if service.ended.done() else "")
                )
                or send(number)
            )
    assert [store.ended.result(), service.ended.result()] == [0, 0]
    assert told[0] == "service SIGTERM"
    assert next(each for each in told if each.startswith("store")) == "store SIGTERM alone"


async def test_a_stubborn_child_does_not_keep_the_others_from_ending_well(monkeypatch: pytest.MonkeyPatch) -> None:
    # A polite child that has a busy machine ends in time too; the stubborn one need not be waited for.
    monkeypatch.setattr("outrider.cli.supervise._LAST_SECONDS", 60.0)
    deaf = asyncio.Event()
    async with Supervisor(grace=0.2, log=lambda name, line: deaf.set() if line.text == "deaf" else None) as supervisor:
        polite = await supervisor.start(fake("polite"))
        await supervisor.announced(polite, SECONDS)
        stubborn = await supervisor.start(fake("stubborn", "--stubborn"))
        await asyncio.wait_for(deaf.wait(), SECONDS)
        polite.ended.add_done_callback(lambda _: stubborn.signal(signal.SIGKILL))
    assert (polite.ended.result(), stubborn.ended.result()) == (0, -signal.SIGKILL)


async def test_grandchildren_end_too() -> None:
    lines: list[str] = []
    async with Supervisor(log=lambda name, line: lines.append(line.text)) as supervisor:
        child = await supervisor.start(fake("parent", "--grandchild"))
        await supervisor.announced(child, SECONDS)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied):  # though the grandchild holds its stderr open
            await asyncio.wait_for(supervisor.until_death(), SECONDS)
        assert lines[0].startswith("grandchild ")
        await until_gone(int(lines[0].split()[1]))


async def test_service_that_never_serves_is_named() -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(fake("target", "--never-ready"))
        address = await supervisor.announced(child, SECONDS)
        with pytest.raises(NotReady, match=f"^target at {address} was not ready within 0.5 s$"):
            await supervisor.guard(until_serving("target", address, 0.5))


async def test_silent_process_is_named() -> None:
    async with Supervisor(grace=1) as supervisor:
        child = await supervisor.start(Command("sleeper", ("sleep", "60")))
        with pytest.raises(NotReady, match=r"^sleeper did not start within 0.2 s$"):
            await supervisor.announced(child, 0.2)


async def test_missing_program_is_named() -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(Command("store", ("/no/such/program",)))
        with pytest.raises(ProcessDied, match=r"^store stopped with exit code 2: cannot run /no/such/program"):
            await supervisor.announced(child, SECONDS)


async def test_output_is_bounded_and_progress_bars_are_told_apart() -> None:
    script = "import sys; sys.stderr.write('5%\\r99%\\rdone\\n' + 'x' * 100_000); sys.exit('error: last')"
    lines: list[Line] = []
    async with Supervisor(log=lambda name, line: lines.append(line)) as supervisor:
        await supervisor.start(Command("noisy", (sys.executable, "-c", script)))
        with pytest.raises(ProcessDied, match=r"^noisy stopped with exit code 1"):
            await supervisor.until_death()
    assert lines[:3] == [Line("5%", passing=True), Line("99%", passing=True), Line("done")]
    assert max(len(line.text) for line in lines) <= 16 * 1024


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signal_leaves_no_process(number: signal.Signals) -> None:
    process = await supervising("", "--stubborn")
    children = children_of(process.pid)
    assert len(children) == 2
    os.killpg(process.pid, number)  # as a terminal does it
    assert await asyncio.wait_for(process.wait(), SECONDS) == 7
    await until_gone(*children)


async def test_second_signal_does_not_wait_for_the_grace() -> None:
    process = await supervising("--stubborn")
    children = children_of(process.pid)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), SECONDS) == 7
    await until_gone(*children)


async def test_sigkill_of_the_supervisor_leaves_no_process() -> None:
    process = await supervising("", "--stubborn")
    children = children_of(process.pid)
    assert len(children) == 2
    process.kill()
    await process.wait()
    await until_gone(*children)
