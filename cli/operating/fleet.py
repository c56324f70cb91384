"""Operator's client of routers and nodes: list, drain, change role, and wait."""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio

from cli import client
from cli.client import UnfinishedRestart
from cli.local import plan
from common import tls
from common.identity.tokens import Identity
from common.rpc import make_channel, raise_if_cancelled
from protos.node_pb2 import DrainRequest, SwitchRequest
from protos.node_pb2_grpc import NodeStub
from protos.router_pb2 import (
    ClusterNode,
    DrainRouterRequest,
    GetClusterRequest,
    GetClusterResponse,
)
from protos.router_pb2_grpc import RouterStub

_ANSWER_S = 10.0
_LOOK_S = 0.2

Pairs = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of an operator's credentials, for authentication errors."""

    to_routers: str = ""
    to_nodes: str = ""


_UNKNOWN = Sources()


class Fleet:
    """Client of the routers and nodes of a cluster. For one event loop.

    A method raises UnfinishedRestart if a process does not respond in time or rejects the call. The
    methods `until_...` retry failed calls, and raise it only after `longest_s` seconds.

    Args:
        metadata: credentials for routers. `identity` is for nodes.
        sources: sources of both credentials, for errors.
    """

    def __init__(
        self,
        metadata: client.Metadata,
        certificates: tls.Certificates | None,
        identity: Identity | None,
        sources: Sources = _UNKNOWN,
    ) -> None:
        self._metadata = metadata
        self._certificates = certificates
        self._identity = identity
        self._sources = sources

    async def look(self, router: str) -> GetClusterResponse:
        """Return the cluster as this router knows it."""
        request = GetClusterRequest()
        answer: GetClusterResponse = await self.call_router(router, "GetCluster", request)
        return answer

    async def drain_router(self, address: str, *, in_turn: bool) -> None:
        await self.call_router(address, "Drain", DrainRouterRequest(in_turn=in_turn))

    async def drain_node(self, address: str) -> None:
        await self.call_node(address, "Drain", DrainRequest())

    async def call_router(
        self, address: str, method: str, request: Any, longest_s: float = _ANSWER_S
    ) -> Any:
        async with make_channel(address, self._certificates) as channel:
            stub = RouterStub(channel)  # type: ignore[no-untyped-call]
            call = getattr(stub, method)(request, timeout=longest_s, metadata=self._metadata)
            return await _answer(address, call, self._sources.to_routers)

    async def call_node(
        self, address: str, method: str, request: Any, longest_s: float = _ANSWER_S
    ) -> Any:
        async with make_channel(address, self._certificates, self._identity) as channel:
            stub = NodeStub(channel)  # type: ignore[no-untyped-call]
            call = getattr(stub, method)(request, timeout=longest_s)
            return await _answer(address, call, self._sources.to_nodes, flag="")

    async def get(self, url: str, path: str) -> Any:
        """Return the JSON at a path of a router's HTTP port."""
        config = None if self._certificates is None else self._certificates.config
        context = ssl.create_default_context(cafile=config.ca if config else None)
        if config and config.cert:
            context.load_cert_chain(config.cert, config.key)
        name = config.server_name if config else None
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with aiohttp.ClientSession(
                timeout=timeout, headers=dict(self._metadata)
            ) as session:
                async with session.get(
                    url.rstrip("/") + path, ssl=context, server_hostname=name, allow_redirects=False
                ) as response:
                    text = await response.text()
        except aiohttp.InvalidURL:
            sentence = f"{_FLAG}: {url!r} is invalid, expected http(s)://HOST:PORT"
            raise UnfinishedRestart(sentence) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            number = getattr(error, "errno", None) or 0  # negative: an error of the resolver
            # The numbers of TLS errors are OpenSSL's, not those of the operating system.
            from_system = number > 0 and not isinstance(error, aiohttp.ClientSSLError)
            reason = os.strerror(number) if from_system else str(error) or "timed out"
            raise UnfinishedRestart(client.unreachable(url, reason, _FLAG)) from None
        if response.status != 200:
            source = f" ({self._sources.to_routers})" if response.status == 401 else ""
            raise UnfinishedRestart(f"{url}: {response.status}: {_message(text)}{source}")
        try:
            return json.loads(text)
        except ValueError:
            raise UnfinishedRestart(
                f"{url}{path} is not JSON: {_FLAG} must name a router"
            ) from None

    async def switch_node(self, address: str, role: str, longest_s: float) -> None:
        """Wait until the node has accepted the new role."""
        await self.call_node(address, "Switch", SwitchRequest(role=role), longest_s)

    async def until_has_role(
        self, router: str, node: ClusterNode, role: str, longest_s: float
    ) -> None:
        """Wait until the router finds the node ready in that role.

        If there are nodes to pair with, also wait until it is paired and all worker processes of
        the router use it.
        """

        async def has() -> bool:
            cluster = await self.look(router)
            now = of_address(cluster, node.address)
            if now is None or (now.role, now.state) != (role, "ready"):
                return False
            alike = [each for each in cluster.nodes if each.served_model == node.served_model]
            if all(each.role == role for each in alike):
                return True
            is_paired = any(node.address in pair for pair in paired(cluster))
            return is_paired and _in_use(cluster, node.address)

        sentence = f"{node.address} has the role, but is not ready and paired"
        await until(has, longest_s, sentence)

    async def until_ended(self, router: str, node: ClusterNode, longest_s: float) -> None:
        """Wait until no process with this instance id responds at the node's address."""

        async def ended() -> bool:
            now = of_address(await self.look(router), node.address)
            return now is None or now.instance_id != node.instance_id

        await until(ended, longest_s, f"{node.role} {node.address} still drains")

    async def until_router_ended(self, address: str, since: float, longest_s: float) -> None:
        """Wait until none of the router's processes is older than `since`.

        Args:
            since: time.monotonic().
        """

        async def ended() -> bool:
            try:
                return (await self.look(address)).router.oldest_process_s < _passed(since)
            except UnfinishedRestart:
                return True

        await until(ended, longest_s, f"router {address} still drains")

    async def until_back(
        self, routers: Sequence[str], node: ClusterNode, pairs: Pairs, longest_s: float
    ) -> None:
        """Wait until a replacement of the node is back.

        Every router must find it ready with all of these pairs, and use it in all worker processes.
        """

        async def back() -> bool:
            for router in routers:
                cluster = await self.look(router)
                now = of_address(cluster, node.address)
                if now is None or now.state != "ready" or now.instance_id == node.instance_id:
                    return False
                if not _in_use(cluster, node.address):
                    return False
                # A node that had changed its role starts again in its original role.
                if now.role == node.role and not pairs <= paired(cluster):
                    return False
            return True

        await until(
            back,
            longest_s,
            f"{node.role} {node.address} has ended, and is not back: its supervisor (`baton up`, "
            "Kubernetes, a service manager) must start it again, or it does not pair, and "
            "its log has the reason",
        )

    async def until_router_back(
        self, address: str, since: float, longest_s: float, models: Collection[str] = ()
    ) -> None:
        """Wait until all of the router's processes started after `since` and the router is ready.

        Args:
            models: names of models that must be ready, too.
        """

        async def back() -> bool:
            now = (await self.look(address)).router
            young = now.oldest_process_s < _passed(since) and not now.silent_processes
            ready = {each.name for each in now.models if each.state == "ready"}
            return young and now.state == "ready" and ready.issuperset(models)

        await until(back, longest_s, f"router {address} has ended, and is not ready again")


def of_address(cluster: GetClusterResponse, address: str) -> ClusterNode | None:
    """Return the node at `address`, or None if it does not exist or respond."""
    for node in cluster.nodes:
        if node.address == address and node.state != "unreachable":
            return node
    return None


def _in_use(cluster: GetClusterResponse, address: str) -> bool:
    """Return whether every worker process uses the node. Any may get the next request."""
    return not cluster.router.silent_processes and address in cluster.router.in_use


def paired(cluster: GetClusterResponse) -> Pairs:
    """Return pairs of each decode node with each prefill node that it can read from."""
    producers = {node.address for node in cluster.nodes if node.role == "prefill"}
    return frozenset(
        (node.address, link.peer)
        for node in cluster.nodes
        if node.role == "decode"  # prefill nodes pair only when they have something to read
        for link in node.links
        if link.peer in producers
    )


async def until(condition: Callable[[], Awaitable[bool]], longest_s: float, sentence: str) -> None:
    """Poll `condition` until it holds. Failed calls are retried.

    Raises:
        UnfinishedRestart: with `sentence`, after `longest_s` seconds.
    """
    end = time.monotonic() + longest_s
    while True:
        reason = ""
        try:
            if await condition():
                return
        except UnfinishedRestart as silent:
            reason = f" ({silent})"
        if time.monotonic() > end:
            raise UnfinishedRestart(f"{sentence} after {longest_s:g} s{reason}")
        await asyncio.sleep(_LOOK_S)


def _passed(since: float) -> float:
    return time.monotonic() - since


async def _answer(address: str, call: Any, source: str, flag: str = "--router") -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise_if_cancelled()
        raise UnfinishedRestart(client.failure(error, address, source, flag)) from None


_FLAG = "--url"


add_url_flag = client.flag(
    _FLAG,
    default=f"http://{plan.HOST}:{plan.HTTP_PORT}",
    metavar="URL",
    help="HTTP port of the router (%(default)s)",
)


def _message(text: str) -> str:
    """Return the message of an error body."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
