"""Shared parts of the HTTP API dialects: request fields, events and errors.

Independent of any one dialect.
"""
