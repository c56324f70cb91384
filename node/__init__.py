"""A node is two processes: a gRPC front on asyncio, and the engine beside the device."""
