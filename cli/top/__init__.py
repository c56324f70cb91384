"""The terminal view of a cluster: `baton top`."""
