"""The KV cache: the page pool, the holders of each page, the prefix cache and its events."""
