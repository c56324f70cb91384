"""Reading of adapters, restricted to one directory that the operator configured."""

from collections.abc import Sequence
from pathlib import Path

import torch

from common.errors import ConfigError, InvalidRequest
from engine.adapters.stored import AdapterLimits, LoraAdapter, read_adapter
from engine.models.below import below
from engine.models.linear import Product

_UNREADABLE = (ArithmeticError, OSError, RuntimeError, ValueError)


class AdapterDirectory:
    """A directory of adapters. For any thread.

    Args:
        directory: None: there is no directory, and no adapter.
        products, dtype: of the model.
        pinned: as in `read_adapter`.
    """

    def __init__(
        self,
        directory: Path | None,
        products: Sequence[Product],
        limits: AdapterLimits,
        dtype: torch.dtype,
        *,
        pinned: bool,
    ) -> None:
        self._directory = None if directory is None else directory.resolve()
        self._products = products
        self._limits = limits
        self._dtype = dtype
        self._pinned = pinned

    def read(self, path: str) -> LoraAdapter:
        """Read an adapter.

        Args:
            path: of a directory below this one, absolute or relative to it.
        Raises:
            InvalidRequest: the path leads elsewhere, or has no adapter for this model.
        """
        if self._directory is None:
            raise InvalidRequest("lora_path: this node has no engine.lora.adapter_dir")
        root = self._directory
        directory = below(root, path, "lora_path", "engine.lora.adapter_dir")
        try:
            return read_adapter(
                directory, self._products, self._limits, self._dtype, pinned=self._pinned
            )
        except ConfigError as error:
            raise InvalidRequest(f"lora_path: {str(error).replace(f'{root}/', '')}") from None
        except _UNREADABLE as error:  # any other defect of a file must not stop the engine
            kind = type(error).__name__
            raise InvalidRequest(f"lora_path: the files cannot be read ({kind})") from error


def no_shelf() -> AdapterDirectory:
    """Return a shelf without adapters."""
    return AdapterDirectory(None, (), AdapterLimits(0, 0), torch.float32, pinned=False)
