from tests.router.rig import model

__all__ = ["model"]
