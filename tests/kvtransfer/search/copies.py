"""Copies and comparable keys of the protocol ends, for a search over their states."""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvtransfer.ports import PagesToRead
from kvtransfer.protocol.attempt import ConsumerLinks
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.producer import ProducerEnd
from kvtransfer.protocol.progress import DeadlineTimer, HeartbeatTimer, ProducerPace

Copier = Callable[[Any], Any]
Keyer = Callable[[Any, float], Hashable]

_WITH_ATTRIBUTES = (
    ConsumerEnd,
    ConsumerLinks,
    ProducerEnd,
    HeartbeatTimer,
    ProducerPace,
    DeadlineTimer,
)
# Times that do not change the behaviour of an end. They are only reported, or averaged.
_TOLD_ONLY = ("admitted_at", "first_ready", "landed")


def fork(value: Any) -> Any:
    """Return a copy that shares only immutable parts."""
    copier = _COPIERS[type(value)]
    return value if copier is None else copier(value)


def key_of(value: Any, now: float) -> Hashable:
    """Return a key that is equal for states that behave alike. Times are relative to `now`."""
    keyer = _KEYERS[type(value)]
    return value if keyer is None else keyer(value, now)


# Both functions handle about a hundred values for each state. Values used unchanged cost no call.


class _Copiers(dict[type, Copier | None]):
    """Copiers by type. None: immutable."""

    def __missing__(self, kind: type) -> Copier | None:
        copier = self[kind] = _copier(kind)
        return copier


class _Keyers(dict[type, Keyer | None]):
    """Key functions by type. None: the value is its own key."""

    def __missing__(self, kind: type) -> Keyer | None:
        keyer = self[kind] = _keyer(kind)
        return keyer


_COPIERS, _KEYERS = _Copiers(), _Keyers()


def _copier(kind: type) -> Copier | None:
    if kind is dict:
        return _copy_dict
    if kind is list:
        return lambda value: [fork(item) for item in value]
    if kind in (deque, set):
        return lambda value: kind(value)
    if kind in _WITH_ATTRIBUTES:
        return _copy_attributes
    if is_dataclass(kind) and kind is not PagesToRead:
        return _Rebuilt(kind)
    return None


def _copy_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    twin = value.copy()
    for key, item in value.items():
        copier = _COPIERS[type(item)]
        if copier is not None:
            twin[key] = copier(item)
    return twin


def _copy_attributes(value: Any) -> Any:
    twin = object.__new__(type(value))
    twin.__dict__.update(_copy_dict(value.__dict__))
    return twin


class _Rebuilt:
    """Copy a dataclass field by field."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._names = [f.name for f in fields(kind)]

    def __call__(self, value: Any) -> Any:
        twin = object.__new__(self._kind)
        for name in self._names:
            item = getattr(value, name)
            copier = _COPIERS[type(item)]
            object.__setattr__(twin, name, item if copier is None else copier(item))
        return twin


def _keyer(kind: type) -> Keyer | None:
    if kind is DeadlineTimer:
        return lambda value, now: frozenset([(key, at - now) for key, at in value._due.items()])
    if kind is dict:
        return lambda value, now: frozenset([(k, key_of(v, now)) for k, v in value.items()])
    if kind in (list, deque):
        return lambda value, now: tuple([key_of(item, now) for item in value])
    if kind is set:
        return lambda value, now: frozenset(value)
    if kind is np.ndarray:
        return lambda value, now: value.tobytes()
    if kind in _WITH_ATTRIBUTES:
        return lambda value, now: tuple([key_of(item, now) for item in value.__dict__.values()])
    if is_dataclass(kind):
        names = [f.name for f in fields(kind) if f.name not in _TOLD_ONLY]
        return lambda value, now: tuple([key_of(getattr(value, name), now) for name in names])
    if issubclass(kind, Enum):
        return lambda value, now: value.value
    if issubclass(kind, msgspec.Struct):
        return lambda value, now: repr(value)
    return None
