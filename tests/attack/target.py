"""Input of an attack arm: addresses, credentials that it may use, and its duration."""

from pathlib import Path
from random import Random
from typing import Self

import msgspec


class Target(msgspec.Struct, frozen=True):
    """A running system, as an attacker who knows all addresses sees it."""

    http: str  # host:port, like all that follow
    router: str
    prefill: str
    decode: str
    data: str  # where pages are read over sockets
    metrics: tuple[str, ...]
    secret_file: Path  # of the cluster, for arms that act as a stolen node. No other arm uses it
    api_key: str  # of a malicious client
    seed: str
    seconds: float  # duration of an arm

    @classmethod
    def read(cls, file: Path) -> Self:
        return msgspec.json.decode(
            file.read_bytes(), type=cls, dec_hook=lambda kind, text: kind(text)
        )

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.encode(self, enc_hook=str))

    def random(self, arm: str) -> Random:
        """Return the same generator for the same seed and arm, independent of other arms."""
        return Random(f"{self.seed}/{arm}")
