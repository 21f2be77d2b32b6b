"""J3: both sides of a connection agree about keepalive, and a peer behind a black hole is found in time."""

from outrider.net.channel import CHANNEL_OPTIONS, SERVER_OPTIONS


def test_j3_a_server_allows_the_pings_that_its_clients_send() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    for side in (client, server):
        assert side["grpc.keepalive_permit_without_calls"] == 1
        assert side["grpc.http2.max_pings_without_data"] == 0, "pings must not stop after two"
        assert int(side["grpc.keepalive_time_ms"]) + int(side["grpc.keepalive_timeout_ms"]) <= 30_000
    assert int(server["grpc.http2.min_ping_interval_without_data_ms"]) < int(client["grpc.keepalive_time_ms"])
