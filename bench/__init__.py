"""The load generator `baton bench`: measures OpenAI-compatible servers, and writes a report.

Speaks HTTP to servers, and starts systems as `baton up` does. Imports no router and no node.
"""
