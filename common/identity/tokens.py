"""Tokens (JWT, HS256): caller and method, signed with the key of a role, valid for a minute."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import jwt

from common.identity.refusals import AuthRejection
from common.identity.roles import ROLES, Role
from common.identity.secret import SecretKeys

LIFETIME_S = 60.0
LEEWAY_S = 30.0  # allowed clock difference between two hosts
_ALGORITHM = "HS256"
_MAX_CHARACTERS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token: its claims and its text."""

    role: Role
    name: str  # of the signer; for a node, its instance id
    audience: str
    nonce: str
    ends: float  # Unix time
    secret: int  # index of the signing secret in the keyring, newest first
    text: str = field(repr=False)


def sign(
    keyring: SecretKeys,
    role: Role,
    name: str,
    audience: str,
    *,
    nonce: str | None = None,
    secret: int = 0,
) -> Token:
    """Create a token.

    Args:
        keyring: has the key.
        role: of the signer.
        name: of the signer.
        audience: only use of the token.
        nonce: of the call, for a proof. None: a new one.
        secret: index of the signing secret in the keyring.
    """
    nonce = nonce or secrets.token_urlsafe(16)
    now = time.time()
    claims: dict[str, Any] = {
        "sub": name,
        "aud": audience,
        "jti": nonce,
        "iat": now,
        "exp": now + LIFETIME_S,
    }
    text = jwt.encode(claims, keyring.keys[role][secret], _ALGORITHM, headers={"kid": role})
    return Token(
        role=role,
        name=name,
        audience=audience,
        nonce=nonce,
        ends=claims["exp"],
        secret=secret,
        text=text,
    )


def verify(keyring: SecretKeys, text: str, audience: str) -> Token:
    """Verify a token.

    Raises:
        AuthRejection: it is not signed by these keys, not for `audience`, or not valid now.
    """
    role = _role(text)
    for number, key in enumerate(keyring.keys[role]):
        try:
            claims = jwt.decode(
                text,
                key,
                algorithms=[_ALGORITHM],
                audience=audience,
                leeway=LEEWAY_S,
                options={"require": ["sub", "aud", "jti", "iat", "exp"]},
            )
        except jwt.InvalidSignatureError:
            continue
        except jwt.InvalidTokenError as error:
            raise _refused(error, text, audience) from error
        ends = float(claims["exp"])
        if ends - float(claims["iat"]) > LIFETIME_S + LEEWAY_S:
            raise AuthRejection(
                "malformed", f"the token is good for longer than {LIFETIME_S:.0f} s"
            )
        return Token(
            role=role,
            name=claims["sub"],
            audience=audience,
            nonce=claims["jti"],
            ends=ends,
            secret=number,
            text=text,
        )
    raise AuthRejection("secret", "the token is signed with another secret than those known here")


def _role(text: str) -> Role:
    """Return the role whose key signed the token, as claimed by the token."""
    if len(text) > _MAX_CHARACTERS:
        raise AuthRejection("malformed", f"the token has more than {_MAX_CHARACTERS} characters")
    try:
        name = jwt.get_unverified_header(text).get("kid")
    except jwt.InvalidTokenError as error:
        raise AuthRejection("malformed", "the token is not a JSON web token") from error
    for role in ROLES:
        if role == name:
            return role
    raise AuthRejection("malformed", "the token names no role that there is")


def _refused(error: jwt.InvalidTokenError, text: str, audience: str) -> AuthRejection:
    match error:
        # These three errors occur after the signature is verified, so the claims are authentic.
        case jwt.ExpiredSignatureError():
            return AuthRejection(
                "clock",
                f"the token was made {time.time() - _made(text):.0f} s ago by the clock of its "
                f"maker and is good for {LIFETIME_S:.0f} s: the clocks of the two hosts differ",
            )
        case jwt.ImmatureSignatureError():
            return AuthRejection(
                "clock",
                f"the token will be made in {_made(text) - time.time():.0f} s by the clock of "
                "its maker: the clocks of the two hosts differ",
            )
        case jwt.InvalidAudienceError():
            made_for = repr(_claims(text).get("aud"))[:100]
            return AuthRejection("call", f"the token was made for {made_for}, not for {audience!r}")
    return AuthRejection("malformed", f"the token is malformed: {error}")


def _made(text: str) -> float:
    return float(_claims(text)["iat"])


def _claims(text: str) -> dict[str, Any]:
    """Return the claims of a token with a verified signature."""
    claims: dict[str, Any] = jwt.decode(text, options={"verify_signature": False})
    return claims
