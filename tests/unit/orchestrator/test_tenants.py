"""The file of tenants, and what a rate lets through."""

from pathlib import Path

import pytest

from orchestrator.tenants import Tenants, TokenBucket, load_tenants

FILE = """
[default]
max_sessions = 2

[tenants.alice]
weight = 4

[tenants."bob & sons"]
tokens_per_second = 100
burst = 50
"""


def written(directory: Path, text: str) -> str:
    path = directory / "tenants.toml"
    path.write_text(text)
    return str(path)


def test_every_tenant_has_its_limits_and_who_is_not_named_the_default(tmp_path: Path) -> None:
    tenants = load_tenants(written(tmp_path, FILE))
    assert tenants.limits("alice").weight == 4
    assert tenants.limits("alice").max_sessions is None
    assert tenants.limits("bob & sons").bucket_size == 50
    assert tenants.limits("mallory").max_sessions == 2
    assert load_tenants("") == Tenants()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.alice]\nweigth = 4", "tenants.alice.weigth"),
        ("[tenants.alice]\nweight = 0", "tenants.alice.weight"),
        ("[default]\ntokens_per_second = -1", "default.tokens_per_second"),
        ("[tenant.alice]\nweight = 4", "tenant"),
        ("[tenants", "Expected"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_tenants(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"/nowhere/tenants\.toml: No such file"):
        load_tenants("/nowhere/tenants.toml")


def test_a_bucket_lets_its_rate_through_on_average() -> None:
    bucket, now, taken = TokenBucket(100.0, 200.0, 0.0), 0.0, 0.0
    while now < 100.0:
        now += bucket.empty_for(now)
        bucket.add(-70.0, now)
        taken += 70.0
    assert 100.0 * 100.0 <= taken <= 100.0 * 100.0 + 200.0 + 2 * 70.0
    assert not bucket.full(now)
    assert bucket.full(now + 3.5)


def test_more_than_a_bucket_holds_goes_through_at_once_and_is_waited_for_afterwards() -> None:
    bucket = TokenBucket(10.0, 20.0, 0.0)
    assert bucket.empty_for(0.0) == 0.0
    bucket.add(-120.0, 0.0)
    assert bucket.empty_for(0.0) == pytest.approx(10.0)
    bucket.add(90.0, 0.0)
    assert bucket.empty_for(0.0) == pytest.approx(1.0)
