"""The client API: gRPC, the OpenAI-compatible HTTP routes, the status page and reports."""
