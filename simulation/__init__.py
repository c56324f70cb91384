"""Simulated nodes, which compute nothing, virtual-time clusters, and capacity planning."""
