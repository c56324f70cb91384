"""The constant fields of all parts of one response: id, model and creation time."""

import time
from typing import Self

import msgspec


class RequestOrigin(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds since 1970

    @classmethod
    def now(cls, answer_id: str, model: str) -> Self:
        return cls(answer_id, model, int(time.time()))
