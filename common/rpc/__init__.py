"""gRPC as all programs use it.

options.py      of all channels and servers
addresses.py    host:port
channels.py     how a server is called: TLS, and who calls
servers.py      servers, and the ports that they listen on
services.py     what is served: errors, tolerant decoding, who may call
prefix_hints.py hints on who holds which prefix
wire_fields.py  how many fields a message has, before it is parsed
last_words.py   why a stream has ended, told so that it is not lost
health.py       for probes
reflection.py   for clients without proto files
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
from common.rpc.services import Admit, Admitted, Guard, add_service

__all__ = [
    "HEALTH_PORT",
    "MAX_HEALTH_WATCHERS",
    "MAX_MESSAGE_BYTES",
    "NODE_SERVER_OPTIONS",
    "Admit",
    "Admitted",
    "Guard",
    "Health",
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
