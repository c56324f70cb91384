"""Who may ask what, whichever protocol the question comes by.

Four kinds of calls: of anybody (health), of clients, of operators who ask and who command. With
a file of API keys clients must have one, and operators an operator's; the cluster's own operator's
key is as good as any. Without the file clients are known by their address, and operators are asked
for that key where others than this host can reach the router; to command, wherever there is one.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from api.auth.api_keys import KeyLimits
from api.auth.client import Client, by_address
from api.auth.keyring import Keyring
from api.auth.usage import Usage
from common.errors import Forbidden, InvalidRequest, RateLimited, ServingError, Unauthenticated
from common.logs.throttle import Throttle, ThrottledLog
from router.metrics import RouterMetrics, Stranger

log = logging.getLogger(__name__)

IsOperator = Callable[[str], bool]  # of the value of an authorization header
Access: TypeAlias = Literal["anybody", "client", "operator", "commander"]
Ask: TypeAlias = Callable[[str, str], Client]  # given an authorization and an address

_BEARER = "bearer "
_MAX_KEY_CHARACTERS = 256  # longer ones are not worth a hash


class Guard:
    """For one event loop."""

    def __init__(
        self,
        keyring: Keyring | None,
        is_operator: IsOperator,
        metrics: RouterMetrics,
        *,
        operators_prove: bool,
        has_secret: bool,
    ) -> None:
        """
        Args:
            keyring: None: clients need no key.
            is_operator: whether what was sent is the cluster's own operator's key.
            operators_prove: whether they need a key where there is no keyring.
            has_secret: whether there is an operator's key at all; if so, nobody commands without.
        """
        self._keyring = keyring
        self._is_operator = is_operator
        self._metrics = metrics
        self._operators_prove = operators_prove or keyring is not None
        self._commanders_prove = self._operators_prove or has_secret
        self._operator = Client("the cluster's operator", Usage(KeyLimits()), operator=True)
        self._log = ThrottledLog(log, Throttle())

    def client(self, authorization: str, address: str) -> Client:
        """Who asks what clients may ask.

        Args:
            authorization: as it was sent; "": nothing was.
            address: where from, without the port.
        Raises:
            Unauthenticated: without a key that is good.
        """
        if self._keyring is None:
            return by_address(address)
        return self._known(authorization, address)

    def operator(self, authorization: str, address: str) -> Client:
        """Who asks what operators may ask.

        Raises:
            Unauthenticated: as for `client`.
            Forbidden: with a key that is a client's.
        """
        return self._one_of_the_operators(authorization, address, prove=self._operators_prove)

    def commander(self, authorization: str, address: str) -> Client:
        """Who changes what operators may merely ask about. Raises as `operator` does."""
        return self._one_of_the_operators(authorization, address, prove=self._commanders_prove)

    def asking(self, access: Access) -> Ask:
        """Return what identifies callers of a method or path with this access."""
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
        """Before the work on requests that came together.

        Raises:
            RateLimited, InvalidRequest: as Usage.begin.
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
        """Raises Unauthenticated."""
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
        self._log.info("a client was refused", peer=address, because=error)
        return error
