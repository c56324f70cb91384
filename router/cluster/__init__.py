"""The cluster: its nodes, their state, and the streams to them."""
