"""Parts of a request that the router and the nodes share."""
