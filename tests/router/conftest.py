from tests.api.rig import model

__all__ = ["model"]
