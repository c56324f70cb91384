"""The router's HTTP server: aiohttp.web with limits for clients. Independent of the endpoints."""
