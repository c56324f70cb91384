"""Input of an attack arm: addresses, credentials that it may use, and its duration."""

from pathlib import Path
from random import Random
from typing import Self

import msgspec


class Target(msgspec.Struct, frozen=True):
    """One running system, as an attacker sees it who has learned all addresses."""

    http: str  # host:port, as all that follow
    router: str
    prefill: str
    decode: str
    data: str  # where pages are read over sockets
    metrics: tuple[str, ...]
    secret_file: Path  # of the cluster, for arms that play a stolen node; no other arm uses it
    api_key: str  # of a client who has turned hostile
    seed: str
    seconds: float  # how long an arm goes on

    @classmethod
    def read(cls, file: Path) -> Self:
        return msgspec.json.decode(
            file.read_bytes(), type=cls, dec_hook=lambda kind, text: kind(text)
        )

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.encode(self, enc_hook=str))

    def random(self, arm: str) -> Random:
        """The same for the same seed and arm, whatever the other arms do."""
        return Random(f"{self.seed}/{arm}")


def host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
