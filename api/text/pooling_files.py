"""A checkpoint's configuration of embeddings and scores.

It comes from the model configuration and from the files of sentence-transformers beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Way = Literal["last", "mean", "cls"]

_MODES: dict[str, Way] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class PoolingFiles:
    """Configuration of pooling.

    Attributes:
        way: how hidden states become a vector.
        normalize: whether vectors have length 1.
        dimensions: lengths to which a vector may be cut. Empty: any.
        classifies: whether the model has a classification head, and none for tokens.
        unsupported: reason why its vectors would be wrong, "" if they are correct.
    """

    way: Way = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    classifies: bool = False
    unsupported: str = ""


def pooling_files(read: Callable[[str], Any], config: dict[str, Any]) -> PoolingFiles:
    """Return the pooling configuration of a checkpoint.

    Args:
        read: returns the JSON of a file of the checkpoint, None if there is no such file.
    """
    modules = read("modules.json")
    kinds, unsupported = [], ""
    path = "1_Pooling"
    for module in modules if isinstance(modules, list) else ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        kinds.append(kind)
        if kind == "Pooling":
            path = str(module.get("path", path))
        elif kind not in _KNOWN_MODULES:
            unsupported = f"modules.json names {kind[:80]!r}, which is not computed here"
    pooling = read(f"{path}/config.json") if ".." not in path else None
    way: Way = "last"
    if isinstance(pooling, dict):
        modes = [mode for mode, on in pooling.items() if mode.startswith("pooling_mode") and on]
        if len(modes) == 1 and modes[0] in _MODES:
            way = _MODES[modes[0]]
        elif modes:
            unsupported = f"{path}/config.json pools by {', '.join(sorted(modes))[:200]}"
    saved_by = config.get("architectures") or ()
    sizes = config.get("matryoshka_dimensions") or ()
    return PoolingFiles(
        way=way,
        normalize="Normalize" in kinds if kinds else True,
        dimensions=tuple(size for size in sizes if type(size) is int),
        classifies=any(str(name).endswith("ForSequenceClassification") for name in saved_by),
        unsupported=unsupported,
    )
