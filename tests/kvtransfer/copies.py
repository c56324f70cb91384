"""Copies and comparable keys of the protocol ends, for a search over their states."""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from kvtransfer.protocol.beats import Beats
from kvtransfer.protocol.deadlines import Deadlines
from kvtransfer.protocol.link_reads import Read
from kvtransfer.protocol.owner_end import OwnerEnd
from kvtransfer.protocol.pace import Pace
from kvtransfer.protocol.reader_end import ReaderEnd
from kvtransfer.protocol.reader_links import ReaderLinks

Copier = Callable[[Any], Any]
Keyer = Callable[[Any, float], Hashable]

_WITH_ATTRIBUTES = (ReaderEnd, ReaderLinks, OwnerEnd, Beats, Pace, Deadlines)
# Moments that change nothing in how an end behaves: the pace learns from them, or they are told.
_TOLD_ONLY = ("admitted_at", "first_ready", "landed")
_copiers: dict[type, Copier] = {}
_keyers: dict[type, Keyer] = {}


def fork(value: Any) -> Any:
    """A copy that shares only what never changes."""
    kind = type(value)
    copier = _copiers.get(kind)
    if copier is None:
        copier = _copiers[kind] = _copier(kind)
    return copier(value)


def key_of(value: Any, now: float) -> Hashable:
    """Equal for states that behave alike. Times count from `now`."""
    kind = type(value)
    keyer = _keyers.get(kind)
    if keyer is None:
        keyer = _keyers[kind] = _keyer(kind)
    return keyer(value, now)


def _same(value: Any) -> Any:
    return value


def _copier(kind: type) -> Copier:
    if kind is dict:
        return lambda value: {key: fork(item) for key, item in value.items()}
    if kind is list:
        return lambda value: [fork(item) for item in value]
    if kind in (deque, set):
        return lambda value: kind(value)
    if kind in _WITH_ATTRIBUTES:
        return _copy_attributes
    if is_dataclass(kind) and kind is not Read:
        names = [f.name for f in fields(kind)]
        return lambda value: _rebuilt(value, names)
    return _same


def _copy_attributes(value: Any) -> Any:
    twin = object.__new__(type(value))
    twin.__dict__.update({name: fork(item) for name, item in value.__dict__.items()})
    return twin


def _rebuilt(value: Any, names: list[str]) -> Any:
    twin = object.__new__(type(value))
    for name in names:
        object.__setattr__(twin, name, fork(getattr(value, name)))
    return twin


def _keyer(kind: type) -> Keyer:
    if kind is Deadlines:
        return lambda value, now: frozenset((key, at - now) for key, at in value._due.items())
    if kind is dict:
        return lambda value, now: frozenset((k, key_of(v, now)) for k, v in value.items())
    if kind in (list, deque):
        return lambda value, now: tuple(key_of(item, now) for item in value)
    if kind is set:
        return lambda value, now: frozenset(value)
    if kind is np.ndarray:
        return lambda value, now: value.tobytes()
    if kind in _WITH_ATTRIBUTES:
        return lambda value, now: tuple(key_of(item, now) for item in value.__dict__.values())
    if is_dataclass(kind):
        names = [f.name for f in fields(kind) if f.name not in _TOLD_ONLY]
        return lambda value, now: tuple(key_of(getattr(value, name), now) for name in names)
    if issubclass(kind, Enum):
        return lambda value, now: value.value
    if issubclass(kind, msgspec.Struct):
        return lambda value, now: repr(value)
    return lambda value, now: value
