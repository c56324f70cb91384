"""`baton top`: the terminal view of a cluster."""
