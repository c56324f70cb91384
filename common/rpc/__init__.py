"""gRPC for all processes.

channels.py  client channels: addresses, options, TLS, identity, and in-memory networks of
simulations
servers.py   servers and their ports, health service for probes, reflection for clients
services.py  service registration: errors, tolerant decoding, authorization
streams.py   both directions of one stream, and the reason of its end
probe.py     health probe command for containers
"""

from common.rpc.channels import (
    MAX_MESSAGE_BYTES,
    NODE_SERVER_OPTIONS,
    Network,
    check_address,
    join_address,
    make_channel,
    raise_if_cancelled,
    use,
)
from common.rpc.servers import (
    HEALTH_PORT,
    MAX_HEALTH_WATCHERS,
    Health,
    add_health_and_reflection,
    bind,
    make_server,
    reserved,
    serving_health,
    stop,
)
from common.rpc.services import Admit, AdmittedCall, RpcGuard, add_service
