"""Signatures of optional packages, recorded from a release. Fakes check their arguments by them.

`python -m tests.support.hardware.recorded` writes the files again. It needs the packages.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from kernels.backends import fla, flashinfer
from kernels.backends.package import Package

DIRECTORY = Path(__file__).parents[2] / "kernels/recorded"
FLASHINFER = (
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl",  # `plan` passes its keyword arguments on to it
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "mla.BatchMLAPagedAttentionWrapper",
    "mla.BatchMLAPagedAttentionWrapper.plan",
    "mla.BatchMLAPagedAttentionWrapper.run",
    "mla.MLAPlanMetadata.csr",
)
PACKAGES: Mapping[str, tuple[Package, tuple[str, ...]]] = {
    "flashinfer": (flashinfer.PACKAGE, FLASHINFER),
    "fla": (fla.PACKAGE, ("chunk_gated_delta_rule",)),
}


class Recorded:
    """The signatures of a package, by name."""

    def __init__(self, name: str) -> None:
        content = json.loads((DIRECTORY / f"{name}.json").read_text())
        self.version: str = content["version"]
        self.signatures: Mapping[str, Any] = content["signatures"]

    def bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by parameter. Raises TypeError for another signature."""
        parameters = [
            inspect.Parameter(
                parameter,
                getattr(inspect.Parameter, kind),
                default=None if optional else inspect.Parameter.empty,
            )
            for parameter, kind, optional in self.signatures[name]
        ]
        return inspect.Signature(parameters).bind(*args, **kwargs).arguments


def record(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of functions, without `self`: name, kind, whether it is optional."""
    functions: list[Callable[..., Any]] = [reduce(getattr, n.split("."), module) for n in names]
    return {
        name: [
            [each.name, each.kind.name, each.default is not each.empty]
            for each in inspect.signature(function).parameters.values()
            if each.name != "self"
        ]
        for name, function in zip(names, functions, strict=True)
    }


def main() -> None:
    for name, (package, names) in PACKAGES.items():
        recorded = record(package.load(), names)
        lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(p)}" for n, p in recorded.items())
        text = f'{{"version": "{package.installed()}",\n "signatures": {{\n{lines}\n }}}}\n'
        (DIRECTORY / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
