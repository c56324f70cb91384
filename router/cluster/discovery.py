"""Service discovery: the node addresses that the entries of --prefill and --decode give now.

All sources are polled and their results merged. A source that fails keeps its last result: a failed
resolver or a half-written file removes no node. Discovery does not contact the nodes.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.logs import kv
from router.cluster.sources import (
    Addresses,
    DiscoveryError,
    DiscoverySource,
    RefreshTimes,
    Resolve,
    Role,
    parse,
    resolve,
)

log = logging.getLogger(__name__)

_LOOK_S = 10.0  # time limit of a lookup
_FIRST_LOOK_S = 2.0  # time limit at the start


@dataclass(frozen=True, slots=True)
class DiscoveredNodes:
    """Addresses by role. Each address occurs once, with one role."""

    prefill: Addresses = ()
    decode: Addresses = ()


class _Entry:
    """A source, its last result and its failure."""

    def __init__(self, text: str, role: Role, source: DiscoverySource) -> None:
        self.text = text
        self.role = role
        self.source = source
        self.addresses: Addresses = ()
        self.failure = ""

    async def look(self, longest_s: float) -> bool:
        """Look up the source. Returns whether `failure` has changed."""
        before, self.failure = self.failure, ""
        try:
            async with asyncio.timeout(longest_s):
                self.addresses = await self.source.look()
        except DiscoveryError as error:
            self.failure = str(error)
        except TimeoutError:
            self.failure = f"no answer within {longest_s:g} s"
        return self.failure != before

    def tell(self) -> None:
        fields = {"role": self.role, "entry": self.text, "nodes": len(self.addresses)}
        if self.failure:
            log.warning(
                "discovery entry failed, its last nodes are kept %s",
                kv(**fields, reason=self.failure),
            )
        else:
            log.info("discovery entry recovered %s", kv(**fields))


class Discovery:
    """Polling of all sources. For one event loop."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        resolve: Resolve = resolve,
        times: RefreshTimes | None = None,
    ) -> None:
        """Parse the entries.

        Args:
            prefill, decode: entries, in the forms of sources.py.
            resolve: a resolver like sources.resolve.
            times: polling intervals.
        Raises:
            ConfigError: an entry is invalid, there is no entry, or one occurs twice.
        """
        if not decode and not prefill:
            raise ConfigError(
                "--decode: at least one decode node is needed; or prefill nodes alone, for vectors"
            )
        _check_once(prefill, decode)
        roles: tuple[tuple[Role, Sequence[str]], ...] = (("prefill", prefill), ("decode", decode))
        self._entries = [
            _Entry(text, role, parse(text, role, resolve, times or RefreshTimes()))
            for role, texts in roles
            for text in texts
        ]
        self._both: set[str] = set()
        self.members = DiscoveredNodes()

    async def start(self) -> None:
        """Look up all sources for the first time.

        Raises:
            ConfigError: a file is unreadable or invalid. A name that does not resolve is no error.
        """
        failed = await asyncio.gather(*(entry.look(_FIRST_LOOK_S) for entry in self._entries))
        for entry in itertools.compress(self._entries, failed):
            if entry.source.required:
                raise ConfigError(f"--{entry.role}: {entry.failure}")
            entry.tell()
        self.members = self._merged()

    async def run(self, on_change: Callable[[DiscoveredNodes], None]) -> None:
        """Poll until cancelled. Calls `on_change` whenever `members` has changed."""
        async with asyncio.TaskGroup() as tasks:
            for entry in self._entries:
                if entry.source.interval_s is not None:
                    tasks.create_task(self._watch(entry, entry.source.interval_s, on_change))

    async def _watch(
        self, entry: _Entry, interval_s: float, on_change: Callable[[DiscoveredNodes], None]
    ) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if await entry.look(_LOOK_S):
                entry.tell()
            members = self._merged()
            if members != self.members:
                self.members = members
                on_change(members)

    def _merged(self) -> DiscoveredNodes:
        prefill, decode = self._named("prefill"), self._named("decode")
        both = prefill.keys() & decode.keys()
        for address in sorted(both - self._both):
            log.warning("node in both roles ignored %s", kv(node=address))
        self._both = both
        return DiscoveredNodes(
            tuple(address for address in prefill if address not in both),
            tuple(address for address in decode if address not in both),
        )

    def _named(self, role: Role) -> dict[str, None]:
        """Return each address once, in the order of the entries."""
        return dict.fromkeys(
            address for entry in self._entries if entry.role == role for address in entry.addresses
        )


def _check_once(prefill: Sequence[str], decode: Sequence[str]) -> None:
    for entry in (*prefill, *decode):
        # One file can list nodes of both roles.
        both = entry in prefill and entry in decode and not entry.startswith("file:")
        if both or prefill.count(entry) > 1 or decode.count(entry) > 1:
            raise ConfigError(f"--prefill, --decode: {entry} is named twice")
