"""The identity of a program by its configuration, and the guard of what it serves."""

from pathlib import Path

from common import tls
from common.config import FrontConfig
from common.identity import certificates as by_certificate
from common.identity import exposure
from common.identity.by_token import ByToken
from common.identity.guard import Guard
from common.identity.identity import Identity
from common.identity.refusals import Count, uncounted
from common.identity.roles import Role
from common.identity.secret import keyrings


def identity_of(
    role: Role, name: str, secret_file: Path | None, count: Count = uncounted
) -> Identity | None:
    """None where no secret is configured.

    Args:
        name: see Identity.
        secret_file: None: the secret may be in the environment.
        count: told of everybody who is not believed.
    Raises:
        ConfigError: the secret is of no use, or there is none in it for `role`.
    """
    found = keyrings(secret_file, role)
    return None if found is None else Identity(role, name, found, count)


def guard_of(
    front: FrontConfig,
    identity: Identity | None,
    certificates: tls.Certificates | None,
    count: Count,
) -> Guard | None:
    """Asks callers for tokens where there is a secret, else for roles in certificates where TLS
    is mutual; None where neither is, which only callers on this host may profit from.

    Raises:
        ConfigError: others could too, and nobody has said that it is meant so.
    """
    mutual = certificates is not None and certificates.config.mutual
    exposure.check(front.host, asked=identity is not None or mutual, insecure=front.insecure)
    if identity is not None:
        return Guard(ByToken(identity), count)
    return Guard(by_certificate.identify, count) if mutual else None
