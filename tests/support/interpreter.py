"""Makes Triton's interpreter faster, with the same results."""

from functools import cache
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


@cache
def patch_language_once() -> None:
    """Patch `triton.language` for the interpreter once in this process.

    The interpreter patches it in each call of a kernel and of each function that a kernel calls,
    which took most of its CPU time. It compiles nothing, so the patches may stay.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
