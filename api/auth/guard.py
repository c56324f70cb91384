"""Authentication and authorization of callers, for every protocol.

There are four kinds of callers: anyone (health), clients, operators that read and operators that
command. With a file of API keys, clients need a key and operators an operator's key. The cluster's
own operator key is always valid. Without the file, clients are identified by their address.
Operators then need the cluster's key if other hosts can reach the router. To command, they need it
whenever the cluster has one.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from api.auth.api_keys import KeyLimits
from api.auth.client import Client, by_address
from api.auth.keyring import ApiKeys
from api.auth.usage import KeyUsage
from common.errors import Forbidden, InvalidRequest, RateLimited, ServingError, Unauthenticated
from common.logs import Throttle, ThrottledLog
from router.metrics import RouterMetrics, Stranger

log = logging.getLogger(__name__)

IsOperator = Callable[[str], bool]  # takes the value of an authorization header
Access: TypeAlias = Literal["anybody", "client", "operator", "commander"]
Ask: TypeAlias = Callable[[str, str], Client]  # takes an authorization and an address

_BEARER = "bearer "
_MAX_KEY_CHARACTERS = 256  # longer ones are rejected without hashing


class ApiKeyGuard:
    """Authentication of callers. For one event loop."""

    def __init__(
        self,
        keyring: ApiKeys | None,
        is_operator: IsOperator,
        metrics: RouterMetrics,
        *,
        operators_prove: bool,
        has_secret: bool,
    ) -> None:
        """
        Args:
            keyring: the API keys. None: clients need no key.
            is_operator: returns whether a header value is the cluster's own operator key.
            operators_prove: whether operators need a key even without a keyring.
            has_secret: whether there is an operator key. If so, every command needs it.
        """
        self._keyring = keyring
        self._is_operator = is_operator
        self._metrics = metrics
        self._operators_prove = operators_prove or keyring is not None
        self._commanders_prove = self._operators_prove or has_secret
        self._operator = Client("the cluster's operator", KeyUsage(KeyLimits()), operator=True)
        self._log = ThrottledLog(log, Throttle())

    def client(self, authorization: str, address: str) -> Client:
        """Identify the caller of a client operation.

        Args:
            authorization: the header as sent. "": not sent.
            address: the caller's address, without the port.

        Raises:
            Unauthenticated: the caller has no valid key.
        """
        if self._keyring is None:
            return by_address(address)
        return self._known(authorization, address)

    def operator(self, authorization: str, address: str) -> Client:
        """Identify the caller of an operator's read-only operation.

        Raises:
            Unauthenticated: as for `client`.
            Forbidden: the key belongs to a client.
        """
        return self._one_of_the_operators(authorization, address, prove=self._operators_prove)

    def commander(self, authorization: str, address: str) -> Client:
        """Identify the caller of an operator's command. Raises as `operator` does."""
        return self._one_of_the_operators(authorization, address, prove=self._commanders_prove)

    def asking(self, access: Access) -> Ask:
        """Return the function that identifies callers with this access."""
        asks: Mapping[Access, Ask] = {
            "anybody": lambda authorization, address: by_address(address),
            "client": self.client,
            "operator": self.operator,
            "commander": self.commander,
        }
        return asks[access]

    def _one_of_the_operators(self, authorization: str, address: str, *, prove: bool) -> Client:
        if not prove:
            return by_address(address)
        client = self._known(authorization, address)
        if not client.operator:
            sentence = f"this is for operators, and the API key {client.name} is a client's"
            raise self._stranger("no_operator", Forbidden(sentence), address)
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
            raise self._stranger("no_key", Unauthenticated(sentence), address)
        key = authorization[len(_BEARER) :].strip()
        held = None
        if self._keyring is not None and len(key) <= _MAX_KEY_CHARACTERS:
            held = self._keyring.find(key)
        if held is None:
            if self._is_operator(authorization):
                return self._operator
            sentence = "this API key is not known here"
            raise self._stranger("unknown_key", Unauthenticated(sentence), address)
        if held.expired:
            sentence = f"the API key {held.client.name} has expired: {held.expires:%FT%T%Z}"
            raise self._stranger("expired_key", Unauthenticated(sentence), address)
        return held.client

    def _stranger(self, reason: Stranger, error: ServingError, address: str) -> ServingError:
        self._metrics.stranger(reason)
        self._log.info("client rejected", peer=address, reason=error)
        return error
