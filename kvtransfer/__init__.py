"""Transfer of KV pages between nodes. The reader reads pages that the owner publishes."""
