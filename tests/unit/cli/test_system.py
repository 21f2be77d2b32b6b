"""What `outrider up` hands to the processes that it starts."""

from outrider.cli.system import SystemOptions, _orchestrator


def test_l3_the_stores_password_is_in_no_listing_of_processes() -> None:
    options = SystemOptions("t", "d", store="rediss://user:secret@host/0")
    command = _orchestrator(options, {"target": "h:1", "draft": "h:2"}, options.store)
    assert "secret" not in " ".join(command.arguments)
    assert command.environment["OUTRIDER_STORE"] == options.store
    assert "secret" not in repr(options)
