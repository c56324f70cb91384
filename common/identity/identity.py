"""Identity of a process with the cluster secret, for outgoing and incoming calls."""

from common.identity import tokens
from common.identity.refusals import AuthRejection, Count
from common.identity.roles import CALLEE, Role
from common.identity.secret import SecretStore
from common.identity.tokens import Token


class Identity:
    """Signs outgoing calls and responses, and verifies incoming ones."""

    def __init__(self, role: Role, name: str, keyrings: SecretStore, count: Count) -> None:
        """Create an identity.

        Args:
            role: of this process.
            name: sent to others. For a node, `node_name(instance)`.
            keyrings: with a key of `role`.
            count: called for each failed authentication.
        """
        self.role = role
        self.name = name
        self.count = count
        self.keyrings = keyrings

    def token(self, method: str) -> Token:
        """Return a token for one call of `method`."""
        return tokens.sign(self.keyrings.current(), self.role, self.name, method)

    def admit(self, method: str, text: str) -> tuple[Token, str]:
        """Verify the token of a call. Returns it with the proof for the caller.

        The proof uses the secret that the caller used: during a rotation, it may have no other.

        Raises:
            AuthRejection: the token is invalid for a call of `method` now.
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
        """Verify the proof for the call of `sent`.

        Raises AuthRejection if the callee is no node of the cluster.
        """
        proof = tokens.verify(self.keyrings.current(), text, _answer(sent.audience))
        if proof.role != _answering(self.role):
            raise AuthRejection("role", f"it has answered as {proof.role}, and is no {CALLEE}")
        if proof.nonce != sent.nonce:
            raise AuthRejection("replayed", "its proof is of another call")


def _answering(caller: Role) -> Role:
    """Return the role of a node's proof. An operator may have only the operator's key."""
    return caller if caller == "operator" else CALLEE


def _answer(method: str) -> str:
    return f"answer of {method}"
