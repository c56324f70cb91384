"""What a program that has the cluster secret is to others, and what it makes of them."""

from common.identity import tokens
from common.identity.refusals import Count, Refused
from common.identity.roles import CALLEE, Role
from common.identity.secret import Keyrings
from common.identity.tokens import Token


class Identity:
    """Signs for calls that it makes and for those that it answers, and checks both of others."""

    def __init__(self, role: Role, name: str, keyrings: Keyrings, count: Count) -> None:
        """
        Args:
            name: told to others; a node's is `node_name(instance)`.
            keyrings: with a key of `role`.
        """
        self.role = role
        self.name = name
        self.count = count
        self.keyrings = keyrings

    def token(self, method: str) -> Token:
        """For one call of `method`."""
        return tokens.sign(self.keyrings.current(), self.role, self.name, method)

    def admit(self, method: str, text: str) -> tuple[Token, str]:
        """What the token of a call says, and the proof that answers it: with the secret that the
        caller has used, of which it may have no other while secrets are replaced.

        Raises:
            Refused: the token is not good for a call of `method`, now.
        """
        keyring = self.keyrings.current()
        called = tokens.verify(keyring, text, method)
        proof = tokens.sign(
            keyring,
            _answering(called.role),
            self.name,
            _answer(method),
            nonce=called.nonce,
            secret=called.secret,
        )
        return called, proof.text

    def check_proof(self, sent: Token, text: str) -> None:
        """Raises Refused: whoever answers the call that `sent` was for is no node of the
        cluster."""
        proof = tokens.verify(self.keyrings.current(), text, _answer(sent.audience))
        if proof.role != _answering(self.role):
            raise Refused("role", f"it has answered as {proof.role}, and is no {CALLEE}")
        if proof.nonce != sent.nonce:
            raise Refused("replayed", "its proof is of another call")


def _answering(caller: Role) -> Role:
    """With whose key a node proves itself. An operator may have no key but his own."""
    return caller if caller == "operator" else CALLEE


def _answer(method: str) -> str:
    return f"answer of {method}"
