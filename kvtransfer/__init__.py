"""Moving KV pages between nodes. The reader reads what the owner publishes."""
