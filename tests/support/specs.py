"""Default requests, steps and configurations for tests that are not about them."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import EngineConfig
from common.request import RequestSpec
from common.requests.namespace import as_bytes
from common.requests.sampling import SamplingParams
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.request import Request

SAMPLING = SamplingParams(max_tokens=8, seed=1)


def make_spec(token_ids: Iterable[int] = (5, 6, 7), **changes: Any) -> RequestSpec:
    """Return a request with a prompt of these tokens."""
    return RequestSpec(**{"token_ids": as_bytes([*token_ids]), "sampling": SAMPLING, **changes})


def make_request(token_ids: Iterable[int] = (5, 6, 7), *, key: int = 1, **fields: Any) -> Request:
    """Return a request as a node receives it.

    Args:
        fields: fields of `Request.of`, and of the specification.
    """
    own = {"origin": (1, key), "deadline": math.inf, "arrived": 0.0}
    names = ("origin", "deadline", "arrived", "start_by", "weights", "pooling")
    own |= {name: fields.pop(name) for name in names if name in fields}
    return Request.of(make_spec(token_ids, **fields), key=key, **own)


def make_batch(
    slots: Sequence[int], starts: Sequence[int], ends: Sequence[int], **fields: Any
) -> ScheduleBatch:
    """Return a step that samples in each row. A step of one token in each row is a decode step."""
    columns = [np.array(each, np.int32) for each in (slots, starts, ends)]
    decodes = (columns[2] - columns[1] == 1).all()
    mode = ForwardMode.DECODE if decodes else ForwardMode.MIXED
    return ScheduleBatch(1, mode, *columns, np.ones(len(slots), np.bool_), **fields)


def cpu_config(model: Path, **fields: Any) -> EngineConfig:
    """Return the configuration of an engine in one thread, with operations of torch."""
    own = {"device": "cpu", "threads": 1, "cpu_kernels": "off", **fields}
    return EngineConfig(model=str(model), **own)
