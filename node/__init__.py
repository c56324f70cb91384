"""A node is two processes: a gRPC frontend on asyncio, and the engine beside the device."""
