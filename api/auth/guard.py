"""Authentication of clients by API key, and of operators over HTTP."""

import asyncio
import hmac
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from api.auth import api_keys
from api.auth.api_keys import KeyEntry
from api.auth.client import Client, KeyUsage, by_address
from common.errors import (
    ConfigError,
    Forbidden,
    InvalidRequest,
    RateLimited,
    ServingError,
    Unauthenticated,
)
from common.identity import tokens
from common.identity.guard import AuthRejection
from common.identity.secret import SecretStore, operator_keys
from common.logs import ThrottledLog
from common.watched_files import WatchedFiles
from router.metrics import ApiKeyMetrics, RejectionReason, RouterMetrics

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class ActiveKey(NamedTuple):
    """The client and expiry of one API key."""

    client: Client
    expires: datetime | None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


class ApiKeys:
    """Clients by API key, from a file that is reloaded when it changes. For one event loop.

    A key that is removed from the file is rejected from then on. Its running requests continue.

    Args:
        salt_by_key: whether each key has namespaces of its own.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, file: Path, *, salt_by_key: bool = False) -> None:
        self._files = WatchedFiles(
            [file], lambda: _read(file), what="API keys", setting="--api-keys"
        )
        self._salt_by_key = salt_by_key
        self._entries: Sequence[KeyEntry] = ()
        self._by_hash: Mapping[str, ActiveKey] = {}
        self._usages: Mapping[str, KeyUsage] = {}
        self._take(self._files.current())

    async def watch(self) -> None:
        """Reload the file when it changes. Never returns.

        Parsing runs in a thread, because thousands of keys take long.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._take(await asyncio.to_thread(self._files.current))

    def find(self, key: str) -> ActiveKey | None:
        """Return the client of a key, or None if there is no such key.

        The time of a lookup reveals at most parts of a key's hash, which do not reveal the key.
        """
        return self._by_hash.get(api_keys.hashed(key))

    def usage(self) -> Mapping[str, ApiKeyMetrics]:
        """Return the metrics of each key, by its name. Safe to call from any thread."""
        return {
            name: ApiKeyMetrics(
                usage.num_requests,
                usage.num_refused,
                usage.num_prompt_tokens,
                usage.num_generated_tokens,
            )
            for name, usage in self._usages.items()
        }

    def _take(self, entries: Sequence[KeyEntry]) -> None:
        if entries is self._entries:
            return
        self._entries = entries
        usages: dict[str, KeyUsage] = {}
        by_hash: dict[str, ActiveKey] = {}
        for entry in entries:
            usage = self._usages.get(entry.name) or KeyUsage(entry.limits)
            usage.limit(entry.limits)
            usages[entry.name] = usage
            client = Client(
                entry.name,
                usage,
                entry.weight,
                operator=entry.role == "operator",
                namespaces_of=entry.name if self._salt_by_key else "",
                priority=entry.priority,
            )
            by_hash[entry.sha256] = ActiveKey(client, entry.expires)
        self._usages, self._by_hash = usages, by_hash


def _read(file: Path) -> Sequence[KeyEntry]:
    try:
        return api_keys.read(file)
    except ConfigError as error:
        raise ConfigError(f"--api-keys: {error}") from error


Access: TypeAlias = Literal["public", "client", "operator", "commander"]

_BEARER = "bearer "
_MAX_KEY_CHARACTERS = 256  # longer ones are rejected without hashing


AUDIENCE = "http"  # audience of operators' tokens


def proves_operator(secrets: SecretStore, key: str) -> bool:
    """Return whether a bearer key proves an operator.

    It may be an operator's key, as printed by `baton cluster-secret --operator`, or a token of role
    operator for AUDIENCE. Such a token may be reused until it expires.
    """
    keyring = secrets.current()
    if any(hmac.compare_digest(key.encode(), own.encode()) for own in operator_keys(keyring)):
        return True
    try:
        return tokens.verify(keyring, key, AUDIENCE).role == "operator"
    except AuthRejection:
        return False


class ApiKeyGuard:
    """Authentication of clients and operators over HTTP and gRPC. For one event loop."""

    def __init__(
        self,
        keyring: ApiKeys | None,  # the API keys. None: clients need no key
        secrets: SecretStore | None,  # None: the router has no cluster secret
        metrics: RouterMetrics,
        *,
        operators_prove: bool,  # operators need a credential even without a keyring
    ) -> None:
        self._keyring = keyring
        self._secrets = secrets
        self._metrics = metrics
        operators_prove = operators_prove or keyring is not None
        self._must_prove: Mapping[Access, bool] = {
            "public": False,
            "client": keyring is not None,
            "operator": operators_prove,
            "commander": operators_prove or secrets is not None,
        }
        self._operator = Client("the cluster's operator", operator=True)
        self._log = ThrottledLog(log)

    def identify(self, access: Access, authorization: str, address: str) -> Client:
        """Identify the caller of an operation.

        Args:
            authorization: the header as sent. "": not sent.
            address: the caller's address, without the port.

        Raises:
            Unauthenticated: the caller has no valid key.
            Forbidden: the operation is for operators, and the key belongs to a client.
        """
        if not self._must_prove[access]:
            return by_address(address)
        client = self._known(authorization, address)
        if access != "client" and not client.operator:
            sentence = f"this call requires an operator's key, and {client.name} is a client's key"
            raise self._rejected("no_operator", Forbidden(sentence), address)
        return client

    def begin(self, client: Client, num_requests: int = 1) -> None:
        """Count requests that arrived together, before any work on them.

        Raises:
            RateLimited, InvalidRequest: as KeyUsage.begin.
        """
        try:
            client.usage.begin(num_requests)
        except RateLimited:
            self._metrics.rejected("limited")
            raise
        except InvalidRequest:
            self._metrics.rejected("invalid")
            raise

    def _known(self, authorization: str, address: str) -> Client:
        """Return the client with this key. Raise Unauthenticated if the key is not valid."""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            sentence = "an API key is missing: send authorization: Bearer KEY"
            raise self._rejected("no_key", Unauthenticated(sentence), address)
        key = authorization[len(_BEARER) :].strip()
        held = None
        if self._keyring is not None and len(key) <= _MAX_KEY_CHARACTERS:
            held = self._keyring.find(key)
        if held is None:
            if self._secrets is not None and proves_operator(self._secrets, key):
                return self._operator
            sentence = "this API key is unknown to this router"
            raise self._rejected("unknown_key", Unauthenticated(sentence), address)
        if held.expired:
            sentence = f"the API key {held.client.name} has expired: {held.expires:%FT%T%Z}"
            raise self._rejected("expired_key", Unauthenticated(sentence), address)
        return held.client

    def _rejected(self, reason: RejectionReason, error: ServingError, address: str) -> ServingError:
        self._metrics.auth_rejected(reason)
        self._log.info("client rejected", peer=address, reason=error)
        return error
