"""A node: a gRPC frontend on asyncio, and an engine process that owns the device."""
