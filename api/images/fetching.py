"""Images that a request names by URL.

The router fetches them only if an operator has allowed it, and only from public addresses. A name
is resolved once, and the connection uses a public address of that result. A DNS server that returns
another address later gains nothing. Redirects are not followed.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver
from yarl import URL

from common.errors import InvalidRequest

Address = IPv4Address | IPv6Address
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE | re.ASCII)
_BLOCK_BYTES = 64 << 10
# IPv6 networks that map to any IPv4 address: NAT64, 6to4 and Teredo.
_TUNNELS = tuple(
    ipaddress.IPv6Network(each)
    for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)


class ImageFetch(Protocol):
    async def __call__(self, url: str, max_bytes: int) -> bytes:
        """Fetch an image.

        Raises:
            InvalidRequest: it cannot be fetched.
        """
        ...


def is_public(address: Address) -> bool:
    """Return whether an address is global and belongs to one machine."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in tunnel for tunnel in _TUNNELS):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


async def no_fetch(url: str, max_bytes: int) -> bytes:
    raise InvalidRequest(
        "images: this router does not fetch URLs (--images.allow-urls is off). Send data:...;base64"
    )


class HttpFetch:
    """Implementation of ImageFetch over HTTP. For one event loop, with a connection for each image.

    Args:
        longest_s: time limit from the DNS lookup to the last byte.
        allowed: returns whether an address may be used.
    """

    def __init__(
        self,
        longest_s: float,
        allowed: Callable[[Address], bool] = is_public,
        resolver: Callable[[], AbstractResolver] = DefaultResolver,
    ) -> None:
        self._longest_s = longest_s
        self._allowed = allowed
        self._resolver = resolver

    async def __call__(self, url: str, max_bytes: int) -> bytes:
        target = self._checked(url)
        try:
            async with asyncio.timeout(self._longest_s):
                return await self._fetched(target, max_bytes)
        except TimeoutError:
            raise InvalidRequest(
                f"{_named(target)} took longer than {self._longest_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidRequest(f"{_named(target)} cannot be fetched: {error}") from error

    def _checked(self, url: str) -> URL:
        try:
            target = URL(url)
            host = target.raw_host  # as used for connecting, with fullwidth digits converted
        except ValueError as error:
            raise InvalidRequest(f"an image's address is invalid: {error}") from error
        if target.scheme not in ("http", "https") or not host or target.user is not None:
            raise InvalidRequest("an image's address is http://HOST/... or https://HOST/...")
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            if not _is_name(host):
                raise InvalidRequest(
                    f"{_named(target)} is not a valid address: its host is neither a name nor an "
                    "IP address in its usual form"
                ) from None
            return target  # the resolver looks it up
        if not self._allowed(literal):  # without a lookup by the resolver
            raise InvalidRequest(f"{_named(target)} is no public address")
        return target

    async def _fetched(self, target: URL, max_bytes: int) -> bytes:
        resolver = _Checked(self._resolver(), self._allowed)
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            async with session.get(target, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise InvalidRequest(f"{_named(target)} answered with {answer.status}, not 200")
                parts, num_bytes = [], 0
                async for part in answer.content.iter_chunked(_BLOCK_BYTES):
                    parts.append(part)
                    num_bytes += len(part)
                    if num_bytes > max_bytes:
                        raise InvalidRequest(
                            f"{_named(target)} has more than the {max_bytes} bytes allowed"
                        )
        return b"".join(parts)


class _Checked(AbstractResolver):
    """A resolver that keeps only allowed addresses of another resolver."""

    def __init__(self, resolver: AbstractResolver, allowed: Callable[[Address], bool]) -> None:
        self._resolver = resolver
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        kept = [each for each in found if self._allowed(ipaddress.ip_address(each["host"]))]
        if not kept:
            raise InvalidRequest(f"images: {host} has no public address")
        return kept

    async def close(self) -> None:
        await self._resolver.close()


def _is_name(host: str) -> bool:
    """Return whether a host can only be a name.

    System resolvers read 0x7f.1, 2130706433 and 127.1 as IPv4 addresses, so a name does not end
    with a number. No top-level domain does.
    """
    last = host.removesuffix(".").rpartition(".")[2]
    return _NAME.fullmatch(host) is not None and not _NUMBER.fullmatch(last)


def _named(target: URL) -> str:
    """Return scheme and host for error messages, without parts that may be secret."""
    return f"images: {target.scheme}://{target.host}"
