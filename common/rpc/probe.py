"""Health probe for containers: exit code 0 if the server is serving.

    python -m common.rpc.probe HOST:PORT

It uses gRPC's health protocol without TLS. For a node with TLS, probe its `server.health_port`.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest()
            said = stub.Check(request, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0 if said.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
