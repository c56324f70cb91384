"""What clients may call the model: as it is served, or as one of its LoRA adapters."""

from collections.abc import Callable, Mapping

from api.dialect.problems import Refusal

_MOST_NAMED = 8  # in an error


class ModelNames:
    """
    Attributes:
        served: what the model itself is called.
    Args:
        adapters: that requests may have now, by name.
    """

    def __init__(self, served: str, adapters: Callable[[], Mapping[str, object]]) -> None:
        self.served = served
        self._adapters = adapters

    @property
    def adapters(self) -> list[str]:
        """Without one that is called as the model is."""
        return sorted(name for name in self._adapters() if name != self.served)

    def adapter(self, model: str | None, lora_path: str | None = None) -> str:
        """Of a request that names `model`, and perhaps an adapter besides; "": none.

        Raises:
            Refusal: there is no such model or adapter, or they are two adapters.
        """
        adapter = "" if model in (None, self.served) else self._known(model or "", "model")
        if not lora_path:
            return adapter
        if adapter not in ("", lora_path):
            sentence = f"lora_path {lora_path!r} and model {model!r} are two adapters"
            raise Refusal(400, sentence, param="lora_path")
        return self._known(lora_path, "lora_path")

    def check_served(self, model: str | None) -> None:
        """Raises Refusal for any other model than the one that is served: an adapter, or none."""
        if self.adapter(model):
            raise Refusal(
                400, f"model {model!r} is a LoRA adapter, and of text alone", param="model"
            )

    def _known(self, name: str, param: str) -> str:
        known = self.adapters
        if name in known:
            return name
        others = [repr(each) for each in (self.served, *known[:_MOST_NAMED])]
        are = "are" if known else "is"
        raise Refusal(
            404,
            f"there is no model {name!r} here; {', '.join(others)} {are} served",
            param=param,
            code="model_not_found",
        )
