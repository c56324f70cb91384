"""Retries of a gRPC client for calls refused before the first message, as in docs/clients.md."""

import json

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
