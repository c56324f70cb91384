"""Pages of KV: the pool, who holds a page, the prefix cache and what it tells."""
