"""Queues and estimates of their waiting time."""
