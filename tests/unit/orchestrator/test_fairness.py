"""Who is served next."""

from collections import Counter
from dataclasses import dataclass

from orchestrator.fairness import Shares, in_turn


@dataclass(frozen=True)
class Claimed:
    tenant: str
    price: float = 1.0
    number: int = 0


def served(shares: Shares, tenants: str, turns: int, prices: dict[str, float]) -> Counter[str]:
    """How often each of the tenants was served, all of which always want something."""
    counts: Counter[str] = Counter()
    for _ in range(turns):
        tenant = shares.least(tenants)
        counts[tenant] += 1
        shares.charge(tenant, prices[tenant])
    return counts


def test_tenants_are_served_by_weight_whatever_a_turn_costs() -> None:
    counts = served(Shares(), "abc", 1_000, {"a": 1.0, "b": 0.5, "c": 10.0})
    # The same sum of prices for each.
    assert abs(counts["b"] - 2 * counts["a"]) <= 2
    assert abs(counts["a"] - 10 * counts["c"]) <= 10


def test_a_tenant_without_work_saves_nothing_up_and_owes_what_it_had() -> None:
    shares = Shares()
    served(shares, "a", 1_000, {"a": 1.0})
    assert served(shares, "ab", 10, {"a": 1.0, "b": 1.0}) == {"a": 5, "b": 5}
    shares.charge("b", 100.0)
    assert served(shares, "ab", 10, {"a": 1.0, "b": 1.0}) == {"a": 10}


def test_what_was_charged_too_much_comes_back() -> None:
    shares = Shares()
    shares.charge("a", 100.0)
    shares.charge("b", 10.0)
    shares.correct("a", -95.0)
    assert shares.least("ba") == "a"


def test_names_that_say_nothing_any_more_are_forgotten() -> None:
    shares = Shares()
    for index in range(5_000):
        shares.charge(str(index), 1.0)
        shares.charge("busy", 2.0)
    assert len(shares._served) < 1_100


def test_claims_go_in_turn_and_what_did_not_go_is_not_charged() -> None:
    claims = [Claimed("a", number=index) for index in range(100)] + [Claimed("b", number=index) for index in range(4)]
    shares, taken = Shares(), []
    for claim in in_turn(claims, shares):
        if len(taken) == 8:
            break
        taken.append(claim)
    assert [claim.number for claim in taken if claim.tenant == "a"] == [0, 1, 2, 3]
    assert [claim.number for claim in taken if claim.tenant == "b"] == [0, 1, 2, 3]
    assert shares._served == {"a": 4.0, "b": 4.0}
    assert len(list(in_turn(claims, shares))) == 104
