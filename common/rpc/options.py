"""Options of all gRPC channels and servers."""

# A prompt of a million tokens has 3 to 5 MB, and a Step of 10,000 requests 0.1 MB.
MAX_MESSAGE_BYTES = 12 << 20

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A vanished host sends no reset. A ping every 10 s with 5 s to answer detects it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Deadlines and backoff are decided by callers, not by the library (1 s to 2 min).
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Each new channel gets a new connection. Otherwise it would inherit the last one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # By default, a second server binds the same port silently and gets half of the connections.
    ("grpc.so_reuseport", 0),
    # Otherwise the server ends connections of clients that ping as in CHANNEL_OPTIONS.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # For silent connections. The default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

# Routers, other nodes, operators and probes call a node over one connection each, with few calls.
# gRPC limits connections in total, not by host: unauthenticated hosts may open many, for a short
# time.
NODE_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", 64),  # per connection
    ("grpc.max_allowed_incoming_connections", 8192),  # 17 KB each; see `descriptors.py`
    ("grpc.max_connection_idle_ms", 10_000),  # for connections without calls
)
