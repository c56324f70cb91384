"""Model names that clients may use: the served name and the names of LoRA adapters."""

from collections.abc import Callable, Mapping

from api.dialect.problems import ApiError

_MOST_NAMED = 8  # in an error


class ModelNames:
    """Names of the served model and its adapters.

    Attributes:
        served: name of the model itself.

    Args:
        adapters: returns the adapters that requests may use now, by name.
    """

    def __init__(self, served: str, adapters: Callable[[], Mapping[str, object]]) -> None:
        self.served = served
        self._adapters = adapters

    @property
    def adapters(self) -> list[str]:
        """Return the adapter names, without one that equals the model's name."""
        return sorted(name for name in self._adapters() if name != self.served)

    def adapter(self, model: str | None, lora_path: str | None = None) -> str:
        """Return the adapter of a request with these fields, "" for none.

        Raises:
            ApiError: there is no such model or adapter, or the fields name two adapters.
        """
        adapter = "" if model in (None, self.served) else self._known(model or "", "model")
        if not lora_path:
            return adapter
        if adapter not in ("", lora_path):
            sentence = f"lora_path {lora_path!r} and model {model!r} are two adapters"
            raise ApiError(400, sentence, param="lora_path")
        return self._known(lora_path, "lora_path")

    def check_served(self, model: str | None) -> None:
        """Raise ApiError if `model` is an adapter or does not exist."""
        if self.adapter(model):
            raise ApiError(
                400, f"model {model!r} is a LoRA adapter, and of text alone", param="model"
            )

    def _known(self, name: str, param: str) -> str:
        known = self.adapters
        if name in known:
            return name
        others = [repr(each) for each in (self.served, *known[:_MOST_NAMED])]
        are = "are" if known else "is"
        raise ApiError(
            404,
            f"there is no model {name!r} here; {', '.join(others)} {are} served",
            param=param,
            code="model_not_found",
        )
