from orchestrator.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(threshold=3, cooldown=1.0, max_cooldown=4.0, clock=clock)
    for _ in range(3):
        breaker.failure()
    return breaker


def test_stays_closed_below_the_threshold() -> None:
    breaker = Breaker(threshold=3)
    breaker.failure()
    breaker.failure()
    assert breaker.closed
    breaker.success()
    breaker.failure()
    breaker.failure()
    assert breaker.allows()


def test_opens_and_lets_one_probe_through_after_the_cooldown() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.closed
    assert not breaker.allows()
    clock.now += 1.0
    assert breaker.allows()
    assert not breaker.allows(), "one probe at a time"


def test_a_success_closes_it_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.allows()
    breaker.success()
    assert breaker.closed
    assert all(breaker.allows() for _ in range(5))


def test_failed_probes_wait_longer_up_to_the_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(4):
        waited = 0.0
        while not breaker.allows():
            clock.now += 0.5
            waited += 0.5
        waits.append(waited)
        breaker.failure()
    assert waits == [1.0, 2.0, 4.0, 4.0]


def test_failures_of_calls_that_began_before_it_opened_do_not_keep_it_open() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.9
    for _ in range(40):
        breaker.failure()
    clock.now += 0.1
    assert breaker.allows(), "the first cooldown, from when it opened"
    breaker.failure()
    breaker.failure()
    clock.now += 2.0
    assert breaker.allows(), "one probe failed: doubled once"
