"""Names of the served models and their adapters, and the choice of a request's model."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import msgspec
from aiohttp import web

from api.dialect.problems import ApiError, Words, invalid
from api.http.messages import Handler, HttpRequest
from router.metrics import RouterMetrics

_MOST_NAMED = 24  # in an error: all models, and some adapters


class ModelNames:
    """Names of one served model and its adapters.

    An adapter is also called MODEL:ADAPTER, as in SGLang.

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
        """Return the adapter names, except one that equals the model's name."""
        return sorted(name for name in self._adapters() if name != self.served)

    def adapter(self, model: str | None, lora_path: str | None = None) -> str:
        """Return the adapter for a request with these fields, or "".

        Raises:
            ApiError: there is no such model or adapter, or the fields name two adapters.
        """
        adapter = "" if model in (None, self.served) else self._known(model or "", "model")
        if not lora_path:
            return adapter
        if adapter not in ("", lora_path):
            raise invalid("lora_path", f"{lora_path!r} differs from the adapter in model {model!r}")
        return self._known(lora_path, "lora_path")

    def check_served(self, model: str | None) -> None:
        """Raise ApiError if `model` is an adapter or does not exist."""
        if self.adapter(model):
            raise invalid("model", f"{model!r} is a LoRA adapter, which only supports text")

    def find(self, name: str) -> str | None:
        """Return the adapter with this name, or None."""
        adapters = self._adapters()
        for each in (name, name.removeprefix(f"{self.served}:")):
            if each in adapters and each != self.served:
                return each
        return None

    def _known(self, name: str, param: str) -> str:
        adapter = self.find(name)
        if adapter is None:
            refuse_unknown(name, [self.served, *self.adapters], param)
        return adapter


def refuse_unknown(name: str, known: Sequence[str], param: str = "model") -> NoReturn:
    """Raise ApiError for an unknown name. `known`: models and adapters, the models first."""
    named = ", ".join(map(repr, known[:_MOST_NAMED]))
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    are = "are" if len(known) > 1 else "is"
    raise ApiError(
        404,
        f"there is no model {name!r} here; {named}{more} {are} served",
        param=param,
        code="model_not_found",
    )


class ListedModel(NamedTuple):
    """A model or adapter as clients name it.

    Attributes:
        served: name of the served model.
        adapter: name of the adapter. Empty: the model itself.
    """

    name: str
    served: str
    adapter: str


class AllModelNames:
    """Names of all models of a router and their adapters."""

    def __init__(self, models: Sequence[ModelNames]) -> None:
        self._models = {each.served: each for each in models}

    def served_by(self, name: str | None) -> str:
        """Return the name of the served model for a request.

        Args:
            name: a model or one of its adapters. None: the only model.

        Raises:
            ApiError: there is no such model, several models have an adapter with this name, or the
                name is missing and there are several models.
        """
        if name in self._models:
            return name
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models))
            raise invalid("model", f"is required, because several are served: {self._quoted}")
        having = [served for served, each in self._models.items() if each.find(name) is not None]
        if len(having) > 1:
            choices = " or ".join(repr(f"{served}:{name}") for served in having)
            raise invalid("model", f"{name!r} is an adapter of several models: use {choices}")
        if not having:
            refuse_unknown(name, [each.name for each in self.listed()])
        return having[0]

    def listed(self) -> Iterator[ListedModel]:
        """Yield the models, then their adapters.

        An adapter whose name is not unique is listed as MODEL:ADAPTER.
        """
        adapters = [(each.served, name) for each in self._models.values() for name in each.adapters]
        times = Counter([*self._models, *(name for _, name in adapters)])
        for served in self._models:
            yield ListedModel(served, served, "")
        for served, name in adapters:
            yield ListedModel(name if times[name] == 1 else f"{served}:{name}", served, name)

    @property
    def _quoted(self) -> str:
        return ", ".join(map(repr, self._models))


class _Named(msgspec.Struct):
    """The field of every request body that names the model."""

    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class EndpointByModel:
    """HTTP handler that passes each request to the endpoint of the model that it names."""

    def __init__(
        self,
        names: AllModelNames,
        endpoints: Mapping[str, Handler],
        metrics: RouterMetrics,
        words: Words,
    ) -> None:
        self._names = names
        self._endpoints = endpoints
        self._metrics = metrics
        self._words = words

    async def __call__(self, request: HttpRequest) -> web.StreamResponse:
        try:
            named = _NAMED.decode(request.body).model
        except (ValueError, RecursionError):
            # The endpoint of any model reports what is wrong with the body.
            return await next(iter(self._endpoints.values()))(request)
        try:
            served = self._names.served_by(named)
        except ApiError as refusal:
            self._metrics.rejected("invalid")
            return refusal.in_words(self._words).response()
        return await self._endpoints[served](request)
