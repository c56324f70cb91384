"""The router's HTTP port: aiohttp.web speaks HTTP/1.1, with limits for clients.

Independent of the endpoints.
"""
