from tests.api.two_nodes import client, d0, d1, router, two

__all__ = ["client", "d0", "d1", "router", "two"]
