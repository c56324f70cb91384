"""Queues for resources that requests need before scheduling: a compiled guide, an adapter slot."""
