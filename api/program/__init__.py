"""The router process: construction, worker processes, start and graceful shutdown."""
