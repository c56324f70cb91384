"""Simulated nodes, which compute nothing, and capacity planning."""
