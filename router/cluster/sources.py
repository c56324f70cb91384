"""Service discovery: node addresses from the entries of --prefill, --decode and --encode.

    host:port        one node
    dns:NAME:PORT    every address (A, AAAA) of NAME, for example of a headless Service
    file:PATH        addresses in a YAML or JSON file: a list, or one list for each role

A source looks up its addresses on request. Discovery polls all sources and merges the results.
"""

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import yaml

from common import rpc
from common.errors import ConfigError, InvalidRequest
from common.logs import kv

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "encode"]
Addresses = tuple[str, ...]
Resolve = Callable[[str, int], Awaitable[Addresses]]

MAX_ADDRESSES = 1024  # limit of the list sent to a decode node
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RefreshTimes:
    """Polling intervals in seconds."""

    dns_s: float = 3.0
    file_s: float = 1.0
    settled_s: float = 0.1  # until the second read of a changed file


class DiscoveryError(Exception):
    """The source has no result now. The message says why."""


def parse(entry: str, role: Role, resolve: Resolve, times: RefreshTimes) -> "DiscoverySource":
    """Return the source for an entry. Raises ConfigError if the entry has an unknown form."""
    kind, _, rest = entry.partition(":")
    try:
        match kind:
            case "dns":
                name, _, port = rpc.check_address(rest).rpartition(":")
                return DnsSource(name, int(port), resolve, times.dns_s)
            case "file" if rest:
                return FileSource(Path(rest), role, times)
            case _:
                return FixedSource(rpc.check_address(entry))
    except InvalidRequest as error:
        raise ConfigError(
            f"--{role}: {entry[:100]!r} is invalid: expected host:port, dns:NAME:PORT or file:PATH"
        ) from error


async def resolve(name: str, port: int) -> Addresses:
    """Return host:port of each address of `name` by the system resolver, without blocking.

    Raises:
        OSError: the name has no address, or the resolver does not respond.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return tuple(sorted({rpc.join_address(str(where[0]), port) for *_, where in found}))


@dataclass(frozen=True, slots=True)
class FixedSource:
    """One fixed address."""

    address: str
    interval_s: None = None
    required: bool = False

    async def look(self) -> Addresses:
        """Return the current addresses. Sources raise DiscoveryError."""
        return (self.address,)


@dataclass(frozen=True, slots=True)
class DnsSource:
    """A DNS name. Each of its current addresses is a node."""

    name: str
    port: int
    resolve: Resolve
    interval_s: float
    required: bool = False  # a headless Service has no address before its first pod

    async def look(self) -> Addresses:
        try:
            return _bounded(await self.resolve(self.name, self.port))
        except OSError as error:
            raise DiscoveryError(
                f"cannot resolve {self.name}: {error.strerror or error}"
            ) from error
        except UnicodeError as error:  # for example, a label is too long
            raise DiscoveryError(f"{self.name} is not a valid host name: {error}") from error


class FileSource:
    """A file that may be rewritten at any time.

    New content is used once two successive reads are equal, because a write may take several steps.
    """

    required = True

    def __init__(self, path: Path, role: Role, times: RefreshTimes) -> None:
        self.interval_s = times.file_s
        self._settled_s = times.settled_s
        self._path = path
        self._role = role
        self._settled: bytes | None = None
        self._known: tuple[bytes, Addresses] | None = None  # content and its addresses

    async def look(self) -> Addresses:
        content = await asyncio.to_thread(self._content)
        while content != self._settled:
            self._settled = content
            await asyncio.sleep(self._settled_s)
            content = await asyncio.to_thread(self._content)
        if self._known is None or self._known[0] != content:
            self._known = content, self._addresses(content)
        return self._known[1]

    def _content(self) -> bytes:
        try:
            if self._path.exists() and not self._path.is_file():
                raise DiscoveryError(
                    f"{self._path} is not a file"
                )  # reading a pipe might never end
            with self._path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise DiscoveryError(f"cannot read {self._path}: {error.strerror}") from error
        if len(content) > _MAX_FILE_BYTES:
            raise DiscoveryError(f"{self._path} has more than {_MAX_FILE_BYTES} bytes")
        return content

    def _addresses(self, content: bytes) -> Addresses:
        try:
            # YAML is a superset of JSON. BaseLoader reads every scalar as a string.
            named = yaml.load(content, yaml.BaseLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise DiscoveryError(
                f"{self._path} is not YAML: {' '.join(str(error).split())}"
            ) from error
        if isinstance(named, dict):
            named = named.get(self._role)
        if not isinstance(named, list):
            raise DiscoveryError(
                f"{self._path}: expected a list of addresses, or one under {self._role!r}"
            )
        try:
            return _bounded(tuple(rpc.check_address(str(address)) for address in named))
        except InvalidRequest as error:
            raise DiscoveryError(f"{self._path}: {error}") from error


# A source of node addresses. `interval_s` is the time between lookups, or None if the result never
# changes. If it is `required`, a failed first lookup is a configuration error.
DiscoverySource: TypeAlias = FixedSource | DnsSource | FileSource


def _bounded(addresses: Addresses) -> Addresses:
    if len(addresses) > MAX_ADDRESSES:
        raise DiscoveryError(f"{len(addresses)} addresses, {MAX_ADDRESSES} are allowed")
    return addresses


_LOOK_S = 10.0  # time limit of a lookup, in seconds
_FIRST_LOOK_S = 2.0  # time limit of the first lookup, in seconds


@dataclass(frozen=True, slots=True)
class DiscoveredNodes:
    """Node addresses by role. Each address occurs once, with one role."""

    prefill: Addresses = ()
    decode: Addresses = ()
    encode: Addresses = ()


class _Entry:
    """One source, its last result and its failure."""

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

    def log_change(self) -> None:
        fields = {"role": self.role, "entry": self.text, "nodes": len(self.addresses)}
        if self.failure:
            log.warning(
                "discovery entry failed, its last nodes are kept %s",
                kv(**fields, reason=self.failure),
            )
        else:
            log.info("discovery entry recovered %s", kv(**fields))


class Discovery:
    """Polls all sources, without contacting the nodes. For one event loop.

    A source that fails keeps its last result, so a failed resolver or a half-written file removes
    no node.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        encode: Sequence[str] = (),
        *,
        resolve: Resolve = resolve,
        times: RefreshTimes | None = None,
    ) -> None:
        """Parse the entries.

        Args:
            prefill, decode, encode: entries, in the forms listed at the top of this file.
            resolve: resolves DNS names, like `resolve` of this module.
        Raises:
            ConfigError: an entry is invalid or occurs twice, or there is no entry.
        """
        if not decode and not prefill:
            raise ConfigError(
                "--decode: at least one decode node is required, except for embeddings (only "
                "--prefill)"
            )
        roles: Mapping[Role, Sequence[str]] = {
            "prefill": prefill,
            "decode": decode,
            "encode": encode,
        }
        _check_once(roles)
        self._entries = [
            _Entry(text, role, parse(text, role, resolve, times or RefreshTimes()))
            for role, texts in roles.items()
            for text in texts
        ]
        self._several: set[str] = set()
        self.members = DiscoveredNodes()

    async def start(self) -> None:
        """Look up all sources for the first time.

        Raises:
            ConfigError: a file is unreadable or invalid. An unresolved DNS name is not an error.
        """
        failed = await asyncio.gather(*(entry.look(_FIRST_LOOK_S) for entry in self._entries))
        for entry in itertools.compress(self._entries, failed):
            if entry.source.required:
                raise ConfigError(f"--{entry.role}: {entry.failure}")
            entry.log_change()
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
                entry.log_change()
            members = self._merged()
            if members != self.members:
                self.members = members
                on_change(members)

    def _merged(self) -> DiscoveredNodes:
        named = {role: self._named(role) for role in get_args(Role)}
        counts = Counter(itertools.chain.from_iterable(named.values()))
        several = {address for address, count in counts.items() if count > 1}
        for address in sorted(several - self._several):
            log.warning("node in several roles ignored %s", kv(node=address))
        self._several = several
        return DiscoveredNodes(
            *(tuple(each for each in of if each not in several) for of in named.values())
        )

    def _named(self, role: Role) -> dict[str, None]:
        """Return the addresses of a role without duplicates, in the order of the entries."""
        return dict.fromkeys(
            address for entry in self._entries if entry.role == role for address in entry.addresses
        )


def _check_once(roles: Mapping[Role, Sequence[str]]) -> None:
    named = [
        # One file can list nodes of all roles.
        (entry, role if entry.startswith("file:") else "")
        for role, entries in roles.items()
        for entry in entries
    ]
    for (entry, _), count in Counter(named).items():
        if count > 1:
            raise ConfigError(f"--{', --'.join(roles)}: {entry} is named twice")
