"""Where adapters are read from: below one directory, which the operator names, and nowhere else."""

from collections.abc import Sequence
from pathlib import Path

import torch

from common.errors import ConfigError, InvalidRequest
from engine.adapters.stored import Adapter, AdapterLimits, read_adapter
from engine.models.below import below
from engine.models.linear import Product

_UNREADABLE = (ArithmeticError, OSError, RuntimeError, ValueError)


class Shelf:
    """For any thread.

    Args:
        directory: None: there is none, and no adapter.
        products, dtype: of the model.
        pinned: as of `read_adapter`.
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

    def read(self, path: str) -> Adapter:
        """
        Args:
            path: of a directory below this one; relative to it, or whole.
        Raises:
            InvalidRequest: it leads elsewhere, or what is there is no adapter for this model.
        """
        if self._directory is None:
            raise InvalidRequest("lora_path: this node has no engine.lora.directory")
        root = self._directory
        directory = below(root, path, "lora_path", "engine.lora.directory")
        try:
            return read_adapter(
                directory, self._products, self._limits, self._dtype, pinned=self._pinned
            )
        except ConfigError as error:
            raise InvalidRequest(f"lora_path: {str(error).replace(f'{root}/', '')}") from None
        except _UNREADABLE as error:  # whatever else is wrong with a file, the engine goes on
            kind = type(error).__name__
            raise InvalidRequest(f"lora_path: what is there cannot be read ({kind})") from error


def no_shelf() -> Shelf:
    """Where nothing is read."""
    return Shelf(None, (), AdapterLimits(0, 0), torch.float32, pinned=False)
