"""G, J2: the fail-over table. Every row breaks a system of processes while 20 clients stream, and no client notices."""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from bench.chaos.clients import Crowd, Tally
from bench.chaos.faults import FAULTS, Fault
from bench.chaos.fleet import Fleet, running_fleet
from bench.chaos.rounds import Injector
from outrider.cli.tether import tethered
from tests.harness.processes import ROOT

CLIENTS, SEED = 20, 7
# A busy machine takes its time to start six processes, and to start one again.
pytestmark = pytest.mark.timeout(400)
# Where nobody is left everything waits for processes that start; the soak has those.
ROWS = [fault for fault in FAULTS if not fault.name.startswith("every")]


class Table:
    """The system, its clients, and what breaks it."""

    def __init__(self, fleet: Fleet) -> None:
        rng = Random(SEED)
        self.fleet = fleet
        self.crowd = Crowd(fleet.addresses, CLIENTS, rng)
        self.injector = Injector(fleet, self.crowd, rng)

    async def row(self, fault: Fault) -> None:
        """Injects a fault, once all that it may hit is there again."""
        await self.fleet.until_whole()
        self.crowd.tally = Tally()
        await self.injector.inject(fault)

    def faultless(self) -> None:
        """Fails the test that finds something wrong."""
        log = "\n".join(self.fleet.lines)
        assert self.crowd.tally.faultless, f"{self.crowd.tally}\n{log}"
        assert not self.fleet.trouble, f"{self.fleet.trouble}\n{log}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def table() -> AsyncIterator[Table]:
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        async with running_fleet(Path(directory)) as fleet:
            table = Table(fleet)
            try:
                await table.crowd.learn()
                table.crowd.come()
                yield table
            finally:
                await table.crowd.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", ROWS, ids=lambda fault: fault.name.replace(" ", "-"))
async def test_g_j2_no_client_notices(table: Table, fault: Fault) -> None:
    await table.row(fault)
    table.faultless()


@pytest.mark.asyncio(loop_scope="module")
async def test_g_j2_what_was_begun_before_the_last_fault_ends_as_it_should(table: Table) -> None:
    await table.crowd.leave()
    await table.fleet.until_whole()
    await table.fleet.until_idle()
    assert table.crowd.tally.sessions >= CLIENTS
    table.faultless()


async def test_the_soak_prints_its_table_and_says_by_its_exit_code_whether_all_was_well() -> None:
    flags = ("--seconds", "900", "--faults", "4", "--clients", "4", "--only", "reset")
    command = tethered((sys.executable, "-m", "bench.soak", *flags))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    for pair in ("client-orchestrator", "orchestrator-draft", "orchestrator-target", "orchestrator-store"):
        assert re.search(rf"^{pair} reset +1 ", output, re.MULTILINE), output
    for total in ("faults injected  4", "lost             0", "differing        0", "client errors    0"):
        assert total in output.splitlines()
