"""Options of gRPC, of all channels and servers of this project."""

# A prompt of a million tokens is 3 to 5 MB of varints; a step of 10 000 requests 0.1 MB.
MAX_MESSAGE_BYTES = 12 << 20

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished sends no reset: a ping every 10 s, answered within 5 s, finds it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # The callers' own deadlines and backoff decide, not the library's (1 s to 2 min).
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A new channel is a new connection; otherwise it inherits the backoff of the last one.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # By default a second server on a port binds in silence and takes half of the connections.
    ("grpc.so_reuseport", 0),
    # Else the server ends connections of clients that ping as CHANNEL_OPTIONS tells them to.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Of a connection that says nothing, two minutes otherwise.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

# A node is called by routers, other nodes, operators and probes, each over one connection with few
# calls.
# gRPC counts connections in all, and not by host: a stranger's may be many, and none for long.
NODE_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", 64),  # of one connection
    ("grpc.max_allowed_incoming_connections", 8192),  # 17 KB each; see `descriptors.py`
    ("grpc.max_connection_idle_ms", 10_000),  # without a call
)
