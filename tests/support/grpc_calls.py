"""gRPC calls that fail: repeated, or refused while the caller writes."""

import json

import grpc

SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "baton.v1.Router"}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ]
}
OPTIONS = (("grpc.service_config", json.dumps(SERVICE_CONFIG)),)


def end_of_stream(address: str, method: str, said: bytes) -> tuple[grpc.StatusCode, str]:
    """Says something at once, and returns status and sentence of the refusal. Blocks.

    Not over grpc.aio: that makes INTERNAL of a status that is there before all is written.
    """
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(method)(iter([said]), timeout=60)
        try:
            for _ in call:
                raise AssertionError("it is answered")
        except grpc.RpcError as error:
            return error.code(), error.details()
    raise AssertionError("it is not refused")
