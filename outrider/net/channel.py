"""Channel and server options of every hop, from one place so that both sides agree (grpc: too_many_pings otherwise)."""

import grpc

from outrider.net.tls import ClientTls

# A LOGITS answer of 65 rows at a 152k vocabulary in float32 is 40 MB; a 1024-item batch is bounded by the token budget.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
# What a client may send to the public service.
MAX_REQUEST_BYTES = 8 * 1024 * 1024
# What a draft worker may send to an orchestrator: blocks, or the hash of every token's text.
MAX_DRAFT_BYTES = 4 * 1024 * 1024

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

# Flow control with a fixed window in place of the one that grpc finds by probing: a probe costs a round some 40 bytes,
# and a window of this size lets a LOGITS answer fill a link of 1 Gbit/s and 20 ms.
_FLOW_CONTROL: list[tuple[str, int | str]] = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
]

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    *_FLOW_CONTROL,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A worker's address belongs to one process: a shared subchannel would keep a dead one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_FLOW_CONTROL,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # Two processes on one port would share its connections in silence; a busy port must be an error.
    ("grpc.so_reuseport", 0),
]


def connect(
    address: str, tls: ClientTls | None = None, *, max_receive_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to host:port, in plain text without `tls`. Does not wait for the peer."""
    options = _options(tls, max_receive_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def connect_blocking(address: str, tls: ClientTls | None = None) -> grpc.Channel:
    """As `connect`, for code without an event loop."""
    options = _options(tls, MAX_MESSAGE_BYTES)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def _options(tls: ClientTls | None, max_receive_bytes: int) -> list[tuple[str, int | str]]:
    options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
