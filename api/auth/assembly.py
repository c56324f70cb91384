"""Construction of client authentication and limits."""

import logging
from dataclasses import dataclass

from api.auth.cors import Cors
from api.auth.guard import ApiKeyGuard, IsOperator
from api.auth.hosts import AllowedHosts
from api.auth.keyring import ApiKeys
from api.auth.operator import OperatorCheck
from common.config import RouterConfig
from common.identity.guard import AuthRejection
from common.identity.program import is_loopback
from common.identity.secret import SecretStore, keyrings
from common.logs import kv
from router.metrics import RouterMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clients:
    """Authentication and limits of clients.

    Attributes:
        has_secret: whether the router has the cluster secret.
    """

    guard: ApiKeyGuard
    keyring: ApiKeys | None
    hosts: AllowedHosts
    cors: Cors
    has_secret: bool

    async def keep_up(self) -> None:
        """Watch the file of keys, if there is one. Never returns."""
        if self.keyring is not None:
            await self.keyring.watch()


def make_clients(config: RouterConfig, metrics: RouterMetrics) -> Clients:
    """Make the guard, keyring, host check and CORS rules.

    Raises:
        ConfigError: the file of API keys, or of the cluster secret, cannot be used.
    """
    host = config.server.host
    here_only = is_loopback(host)
    file = config.clients.api_keys
    keyring = ApiKeys(file, salt_by_key=config.clients.isolate_cache_by_key) if file else None
    if keyring is not None:
        metrics.keys_from(keyring.usage)
    elif not here_only:
        log.warning("clients need no API key: --api-keys is not set %s", kv(host=host))
    held = keyrings(config.server.secret_file, "router")
    return Clients(
        guard=ApiKeyGuard(
            keyring,
            _is_operator(held),
            metrics,
            operators_prove=not (here_only or config.server.insecure),
            has_secret=held is not None,
        ),
        keyring=keyring,
        hosts=AllowedHosts(host, config.clients.allowed_hosts),
        cors=Cors(config.clients.cors_origins),
        has_secret=held is not None,
    )


def _is_operator(held: SecretStore | None) -> IsOperator:
    if held is None:
        return lambda shown: False
    operator = OperatorCheck(held)

    def is_operator(shown: str) -> bool:
        try:
            operator.check(shown)
        except AuthRejection:
            return False
        return True

    return is_operator
