"""The engine that prefill and decode nodes share: loop, batches, KV pages, prefix cache, model."""
