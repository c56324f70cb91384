"""The router: places requests on nodes and streams tokens. Imports no torch."""
