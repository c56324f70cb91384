"""The router: it chooses nodes for each request and streams tokens to clients. Imports no torch."""
