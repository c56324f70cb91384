"""The parts of the served models, by the name that a request has."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from common.errors import InvalidRequest, NotFound

T = TypeVar("T")


class ByModel(Generic[T]):
    """One part of each served model, such as its gRPC service, by the model's name."""

    def __init__(self, parts: Mapping[str, T]) -> None:
        self._parts = parts

    def of(self, model: str | None) -> T:
        """Return the part of a model.

        Args:
            model: empty or None: the only model.
        Raises:
            NotFound: no served model has this name.
            InvalidRequest: it is empty, and there are several models.
        """
        if model:
            if (part := self._parts.get(model)) is None:
                raise NotFound(f"model: there is no {model[:256]!r} here; served: {self._names}")
            return part
        if len(self._parts) > 1:
            raise InvalidRequest(f"model: is required, because several are served: {self._names}")
        return next(iter(self._parts.values()))

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._parts))
