"""Parts of a request that routers and nodes share."""
