"""Import of xgrammar without torch and transformers, unless they are already imported.

xgrammar imports both, for masks on devices and for their tokenizers, which takes seconds of a core
and hundreds of MiB. Baton uses neither, so they are replaced by stand-ins.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

_UNUSED = ("torch", "transformers")


class _StandIn(ModuleType):
    """A module that has a class under any name, which can be instantiated."""

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
        import_module("tvm_ffi")  # works without torch if there is none
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
