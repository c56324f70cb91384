"""What one node has and another one reads, besides the KV of requests: prefixes that it has cached,
and its weights. What any node lends, and fetches."""
