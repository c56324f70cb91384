"""The load generator `baton bench`: drives OpenAI-compatible servers, measures as a client, and
writes a report.

Speaks HTTP to servers and starts systems as `baton up` does. Imports no router and no node.
"""
