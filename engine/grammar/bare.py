"""xgrammar, without torch and transformers where they are not there already.

It imports both, for masks on devices and for tokenizers of theirs, which takes seconds of a core
and hundreds of MiB. Here neither is used, so it gets stand-ins in their place.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

_UNUSED = ("torch", "transformers")


class _StandIn(ModuleType):
    """Has a class of any name, of which there can be an instance."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made


def _imported() -> ModuleType:
    absent = [name for name in _UNUSED if name not in sys.modules]
    if "torch" in absent:
        sys.modules["torch"] = None  # type: ignore[assignment]
        import_module("tvm_ffi")  # which does without where there is none
    for name in absent:
        sys.modules[name] = _StandIn(name)
    try:
        return import_module("xgrammar")
    finally:
        for name in absent:
            del sys.modules[name]


if TYPE_CHECKING:
    import xgrammar
else:
    xgrammar = _imported()
__all__ = ["xgrammar"]
