"""What sessions are called, and that tenants never meet in a name."""

import pytest

from orchestrator.names import new_id, owned, told
from outrider.net.errors import OutriderError


def test_random_ids_are_short_and_fit_the_wire() -> None:
    ids = {new_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(one) == 12 and one.isalnum() and one.isascii() for one in ids)


@pytest.mark.parametrize("session_id", ["", "a b", "x" * 129, "é", "a\n", "acme/a"])
def test_an_id_that_cannot_be_one_is_refused(session_id: str) -> None:
    for tenant in ("", "acme"):
        with pytest.raises(OutriderError, match="session_id is"):
            owned(session_id, tenant)


def test_tenants_never_meet_in_a_name() -> None:
    names = {owned(session_id, tenant) for tenant in ("", "acme", "acme-a") for session_id in ("s", "a-s", "acme")}
    assert len(names) == 9
    assert {told(name) for name in names} == {"s", "a-s", "acme"}


def test_a_name_fits_the_wire() -> None:
    assert len(owned("x" * 123, "acme")) == 128
    with pytest.raises(OutriderError, match="124 characters, this tenant's limit is 123"):
        owned("x" * 124, "acme")
