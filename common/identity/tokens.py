"""Tokens (JWT, HS256) that authenticate one call: role, caller and method, valid for a minute.

An `Identity` signs and verifies them with the keys from the cluster secret. The callee answers each
token with a proof of its own role.
"""

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import jwt

from common.identity.guard import (
    CALLEE,
    ROLES,
    AuthenticatedCaller,
    AuthRejection,
    Caller,
    Count,
    Role,
)
from common.identity.secret import SecretKeys, SecretStore

LIFETIME_S = 60.0
LEEWAY_S = 30.0  # allowed clock difference between two hosts
_ALGORITHM = "HS256"
_MAX_CHARACTERS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The claims and the text of a token."""

    role: Role
    name: str  # name of the signer; for a node, its instance id
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
        keyring: has the signer's key.
        audience: the only method or use for which the token is valid.
        nonce: nonce of the call, for a proof. None: a new one.
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
                "malformed", f"the token is valid for longer than {LIFETIME_S:.0f} s"
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
    raise AuthRejection(
        "secret", "the token is signed with another secret, which this process does not have"
    )


def _role(text: str) -> Role:
    """Return the role that the token claims, whose key must have signed it."""
    if len(text) > _MAX_CHARACTERS:
        raise AuthRejection("malformed", f"the token has more than {_MAX_CHARACTERS} characters")
    try:
        name = jwt.get_unverified_header(text).get("kid")
    except jwt.InvalidTokenError as error:
        raise AuthRejection("malformed", "the token is not a JSON web token") from error
    for role in ROLES:
        if role == name:
            return role
    raise AuthRejection("malformed", "the role of the token does not exist")


def _refused(error: jwt.InvalidTokenError, text: str, audience: str) -> AuthRejection:
    match error:
        # These three errors occur after the signature is verified, so the claims are authentic.
        case jwt.ExpiredSignatureError():
            return AuthRejection(
                "clock",
                f"the token was made {time.time() - _made(text):.0f} s ago by its issuer's clock "
                f"and is valid for {LIFETIME_S:.0f} s: the clocks of the two hosts differ",
            )
        case jwt.ImmatureSignatureError():
            return AuthRejection(
                "clock",
                f"the token was made {_made(text) - time.time():.0f} s in the future by its "
                "issuer's clock: the clocks of the two hosts differ",
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


class Identity:
    """Signs outgoing calls and proofs, and verifies incoming ones."""

    def __init__(self, role: Role, name: str, keyrings: SecretStore, count: Count) -> None:
        """
        Args:
            name: name sent to others. For a node, `node_name(instance)`.
            keyrings: source of keys, with a key of `role`.
            count: called for each failed authentication.
        """
        self.role = role
        self.name = name
        self.count = count
        self.keyrings = keyrings

    def token(self, method: str) -> Token:
        """Return a token for one call of `method`."""
        return sign(self.keyrings.current(), self.role, self.name, method)

    def admit(self, method: str, text: str) -> tuple[Token, str]:
        """Verify the token of a call. Returns it with the proof for the caller.

        The proof is signed with the caller's secret: during a rotation, the caller may have no
        other.

        Raises:
            AuthRejection: the token is not valid for a call of `method` now.
        """
        keyring = self.keyrings.current()
        called = verify(keyring, text, method)
        proof = sign(
            keyring,
            _answering(called.role),
            self.name,
            _answer(method),
            nonce=called.nonce,
            secret=called.secret,
        )
        return called, proof.text

    def check_proof(self, sent: Token, text: str) -> None:
        """Verify the callee's proof for the call of `sent`.

        Raises AuthRejection if the callee is not a node of the cluster.
        """
        proof = verify(self.keyrings.current(), text, _answer(sent.audience))
        if proof.role != _answering(self.role):
            raise AuthRejection("role", f"it responded as {proof.role}, not as {CALLEE}")
        if proof.nonce != sent.nonce:
            raise AuthRejection("replayed", "its proof belongs to another call")


def _answering(caller: Role) -> Role:
    """Return the role that signs a node's proof. An operator may have only the operator's key."""
    return caller if caller == "operator" else CALLEE


def _answer(method: str) -> str:
    return f"answer of {method}"


SHOWN = "authorization"  # metadata of a call: Bearer TOKEN
BEARER = "Bearer "
PROOF = "baton-proof"  # initial metadata of the response
_MAX_NONCES = 1 << 16  # per role, then the oldest are dropped; only key holders add any


class TokenAuthentication:
    """Authenticates the callers of one server by their tokens, each of which is valid once."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        # Expiry of used tokens by nonce. Separate by role, so that no role can displace another's.
        self._ends: dict[Role, OrderedDict[str, float]] = {role: OrderedDict() for role in ROLES}

    def __call__(self, method: str, context: Any) -> AuthenticatedCaller:
        token, proof = self._identity.admit(method, _shown(context))
        self._use(token)
        return AuthenticatedCaller(Caller(frozenset({token.role}), token.name), ((PROOF, proof),))

    def _use(self, token: Token) -> None:
        now = time.time()
        ends = self._ends[token.role]
        while ends and next(iter(ends.values())) + LEEWAY_S < now:
            ends.popitem(last=False)
        if token.nonce in ends:
            raise AuthRejection("replayed", "the token was used before, and is valid for one call")
        ends[token.nonce] = token.ends
        if len(ends) > _MAX_NONCES:
            ends.popitem(last=False)


def _shown(context: Any) -> str:
    metadata = dict(context.invocation_metadata() or ())
    shown = str(metadata.get(SHOWN, ""))
    if not shown.startswith(BEARER):
        raise AuthRejection("missing", "the call has no token: its caller has no cluster secret")
    return shown.removeprefix(BEARER)
