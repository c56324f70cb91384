"""A connection that keeps what is written to it."""

import asyncio
from typing import Any


class Pipe(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False
