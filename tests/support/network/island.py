"""A network namespace with one link, and network faults on that link."""

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import pytest

_NUMBERS = itertools.count(1)
_SLOW = ("root", "tbf", "rate", "2mbit", "burst", "32kbit", "latency", "2s")


class Island:
    """A network namespace that one link connects with this one. Use as a context manager.

    Skips the test if this machine does not allow it.

    Attributes:
        host, shore: addresses of processes inside and outside, as the other side calls them.
    """

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self.host, self.shore = f"10.231.{number}.2", f"10.231.{number}.1"
        self._name = f"b{os.getpid()}n{number}"
        self._outer, self._inner = f"{self._name}o", f"{self._name}i"
        outer, inner = self._outer, self._inner
        # Commands that start and end each fault.
        self._faults: Mapping[str, tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]] = {
            "cut": ([("ip", "link", "set", outer, "down")], [("ip", "link", "set", outer, "up")]),
            "half open": (  # packets from inside arrive outside, but not the reverse
                [("ip", "route", "add", "blackhole", f"{self.host}/32")],
                [("ip", "route", "del", "blackhole", f"{self.host}/32")],
            ),
            "slow": (
                [
                    ("tc", "qdisc", "add", "dev", outer, *_SLOW),
                    (*self.there, "tc", "qdisc", "add", "dev", inner, *_SLOW),
                ],
                [
                    ("tc", "qdisc", "del", "dev", outer, "root"),
                    (*self.there, "tc", "qdisc", "del", "dev", inner, "root"),
                ],
            ),
        }

    @property
    def there(self) -> tuple[str, ...]:
        """Return the prefix of a command that runs in the network namespace."""
        return ("ip", "netns", "exec", self._name)

    def __enter__(self) -> Self:
        outer, inner = self._outer, self._inner
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            _run("ip", "link", "set", inner, "netns", self._name)
            _run("ip", "addr", "add", f"{self.shore}/24", "dev", outer)
            _run("ip", "link", "set", outer, "up")
            _run(*self.there, "ip", "addr", "add", f"{self.host}/24", "dev", inner)
            for device in ("lo", inner):
                _run(*self.there, "ip", "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            pytest.skip(f"needs to be allowed to make network namespaces: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @contextlib.contextmanager
    def befallen(self, fault: str) -> Iterator[None]:
        """Apply a network fault while inside the context.

        Args:
            fault: "cut" | "half open" | "slow".
        """
        begin, end = self._faults[fault]
        for command in begin:
            _run(*command)
        try:
            yield
        finally:
            for command in end:
                _run(*command)

    def _remove(self) -> None:
        for command in (("ip", "netns", "del", self._name), ("ip", "link", "del", self._outer)):
            with contextlib.suppress(OSError):
                subprocess.run(command, capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
