"""How a client of gRPC asks again what was refused before a word of it was said: as docs/clients.md
has it."""

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
