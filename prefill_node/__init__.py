"""The prefill node process: computes the KV of prompts and publishes their pages for decode
nodes."""
