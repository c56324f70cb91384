"""Writes of keys and values into pages, and copies of whole pages between memories."""
