"""The worker processes of one router: their addresses, and calls between them."""
