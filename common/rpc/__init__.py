"""gRPC for all processes.

options.py       options of all channels and servers
addresses.py     host:port
channels.py      client channels: TLS and identity
servers.py       servers and their ports
services.py      services: errors, tolerant decoding, authorization
prefix_hints.py  wire form of hints about cached prefixes
wire_fields.py   number of fields of a message, counted before it is parsed
stream_status.py reason of a stream's end, sent so that it is not lost
streams.py       both directions of one stream
health.py        health service for probes, and reflection for clients without proto files
probe.py         healthcheck command for containers
"""

from common.rpc.addresses import check_address, join_address
from common.rpc.channels import make_channel, raise_if_cancelled
from common.rpc.health import (
    MAX_HEALTH_WATCHERS,
    Health,
    add_health_and_reflection,
    serving_health,
)
from common.rpc.options import MAX_MESSAGE_BYTES, NODE_SERVER_OPTIONS
from common.rpc.servers import HEALTH_PORT, bind, make_server, reserved, stop
from common.rpc.services import Admit, AdmittedCall, RpcGuard, add_service

__all__ = [
    "HEALTH_PORT",
    "MAX_HEALTH_WATCHERS",
    "MAX_MESSAGE_BYTES",
    "NODE_SERVER_OPTIONS",
    "Admit",
    "AdmittedCall",
    "Health",
    "RpcGuard",
    "add_health_and_reflection",
    "add_service",
    "bind",
    "check_address",
    "join_address",
    "make_channel",
    "make_server",
    "raise_if_cancelled",
    "reserved",
    "serving_health",
    "stop",
]
