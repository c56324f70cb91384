"""The load generator `baton bench`: measures OpenAI-compatible servers, and writes a report.

It calls servers over HTTP, and starts systems as `baton up` does. Imports no router and no node.
"""
