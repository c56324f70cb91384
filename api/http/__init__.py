"""The router's HTTP port. aiohttp.web speaks HTTP/1.1; what clients may take is bounded here.

Knows nothing of what it serves.
"""
