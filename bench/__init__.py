"""`baton bench`: load on OpenAI-compatible servers, what clients saw of it, and a report.

Speaks HTTP to servers and starts systems as `baton up` does. Imports no router and no node.
"""
