"""The prefill program: computes the KV of prompts and publishes their pages for decode nodes."""
