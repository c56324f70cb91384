"""Pages of KV: the pool, the holders of each page, the prefix cache and its events."""
