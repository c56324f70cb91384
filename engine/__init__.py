"""The engine of prefill and decode nodes: event loop, scheduler, KV cache, and model."""
