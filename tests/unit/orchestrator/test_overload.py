"""Ten times the load that there is room for, in virtual time: what comes of it, and what those who are refused see."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from orchestrator.admission import Admission
from orchestrator.config import OrchestratorConfig
from orchestrator.metrics import Metrics
from orchestrator.places import Demand
from orchestrator.tenants import Caller, TenantLimits, Tenants
from outrider.net.errors import OutriderError
from tests.harness.virtual_time import VirtualLoop

PLACES, MEAN_SECONDS = 8, 0.7
CAPACITY = PLACES / MEAN_SECONDS  # generations a second
OUTPUT = 100


@dataclass
class Crowd:
    """Clients of tenants that share some places.

    Attributes:
        served: seconds of places that each tenant had.
        refused: how long each refusal took, in seconds.
        told: the times after which to come again.
        most: requests that waited at once, at most.
    """

    admission: Admission
    weights: dict[str, float]
    dice: random.Random = field(default_factory=lambda: random.Random(4))
    served: Counter[str] = field(default_factory=Counter)
    refused: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)
    most: int = 0

    async def ask(self, tenant: str) -> float | None:
        """One request; when it is to come again, if it was refused."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Half of the requests are ten times as long as the others.
        seconds = MEAN_SECONDS * self.dice.choice([2 / 11, 20 / 11])
        try:
            async with self.admission.admitted(Caller(tenant, self.weights[tenant]), Demand(1, 10, OUTPUT)) as place:
                await asyncio.sleep(seconds)
                self.served[tenant] += seconds
                place.generated = OUTPUT
        except OutriderError as error:
            self.refused.append(loop.time() - began)
            pause = error.retry_after or 0.0
            self.told.append(pause)
            return pause
        finally:
            self.most = max(self.most, self.admission.waiting)
        return None

    async def polite(self, tenant: str) -> None:
        """Comes again when it was told to."""
        while True:
            pause = await self.ask(tenant)
            if pause is not None:
                await asyncio.sleep(pause * self.dice.uniform(1.0, 1.5))

    async def flood(self, tenant: str, per_second: float) -> None:
        """Asks at a rate, whatever becomes of it."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.ask(tenant))
                await asyncio.sleep(self.dice.expovariate(per_second))

    async def during(self, seconds: float, *works: "asyncio._CoroutineLike[None]") -> float:
        """Lets these go on for a while; the part of the places' time that was used."""
        self.served.clear()
        self.refused.clear()
        tasks = [asyncio.ensure_future(work) for work in works]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.served.total() / (PLACES * seconds)


def crowd(weights: dict[str, float]) -> Crowd:
    config = OrchestratorConfig(targets="t:1", tokenizer="x", max_sessions=PLACES)
    tenants = {name: TenantLimits(weight=weight) for name, weight in weights.items()}
    return Crowd(Admission(config, Tenants(tenants=tenants), Metrics()), weights)


def in_virtual_time(work: "asyncio._CoroutineLike[None]") -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "share"), [((1.0, 1.0), 1 / 2), ((1.0, 3.0), 3 / 4)])
def test_under_ten_times_the_load_the_places_stay_full_and_both_tenants_have_their_share(
    weights: tuple[float, float], share: float
) -> None:
    async def main() -> None:
        one = crowd(dict(zip(("rude", "polite"), weights, strict=True)))
        polite = [one.polite("polite") for _ in range(2 * PLACES)]
        used = await one.during(60.0, one.flood("rude", 10 * CAPACITY), *polite)
        assert used >= 0.9
        assert one.served["polite"] / one.served.total() == pytest.approx(share, rel=0.1)
        # Nine of ten are refused, most of them at once, and nobody longer than the queue's time.
        refused = sorted(one.refused)
        assert len(refused) > 0.8 * 10 * CAPACITY * 60.0
        assert refused[int(0.9 * len(refused))] == 0.0
        assert refused[-1] <= 5.0
        assert one.most <= 256
        assert 0.1 <= min(one.told) <= max(one.told) <= 30.0
        assert (one.admission.sessions, one.admission.tokens, one.admission.waiting) == (0, 0, 0)

    in_virtual_time(main())


def test_when_the_load_has_gone_requests_are_served_at_once() -> None:
    async def main() -> None:
        one = crowd({"": 1.0})
        await one.during(60.0, one.flood("", 10 * CAPACITY))
        one.refused.clear()
        for _ in range(100):
            assert await one.ask("") is None
        used = await one.during(30.0, *(one.polite("") for _ in range(PLACES + 4)))
        assert used >= 0.9
        assert not one.refused

    in_virtual_time(main())


def test_polite_clients_alone_keep_the_places_full_however_many_they_are() -> None:
    async def main() -> None:
        one = crowd({"": 1.0})
        assert await one.during(60.0, *(one.polite("") for _ in range(10 * PLACES))) >= 0.9

    in_virtual_time(main())


def test_places_that_stop_giving_are_known_to_and_so_are_those_that_give_again() -> None:
    async def main() -> None:
        one = crowd({"": 1.0})
        await one.during(20.0, one.flood("", 2 * CAPACITY))
        loop = asyncio.get_running_loop()
        hold = asyncio.Event()

        async def stuck() -> None:
            async with one.admission.admitted(Caller(), Demand(1, 10, OUTPUT)):
                await hold.wait()

        holders = [asyncio.ensure_future(stuck()) for _ in range(PLACES)]
        await asyncio.sleep(0)
        await one.during(60.0, one.flood("", CAPACITY))
        assert min(one.told[-100:]) > 5.0
        hold.set()
        await asyncio.gather(*holders)
        began = loop.time()
        used = await one.during(30.0, *(one.polite("") for _ in range(2 * PLACES)))
        assert used >= 0.9, loop.time() - began

    in_virtual_time(main())
