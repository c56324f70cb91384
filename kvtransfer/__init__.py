"""Transfer of KV pages between nodes. The consumer reads pages that the producer publishes."""
