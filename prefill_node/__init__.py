"""The prefill node process: computes KV of prompts and publishes it for decode nodes."""
