"""Client requests: parameters, validation, prompts, idempotency and responses."""
