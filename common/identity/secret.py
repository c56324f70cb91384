"""The cluster secret, and the key of each role derived from it.

The secret gives access in every role. An operator's key, which is derived from it, gives access as
an operator only.
"""

import base64
import binascii
import errno
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from common.identity.guard import ROLES, Role
from common.watched_files import WatchedFiles

VARIABLE = "BATON_SECRET"
MIN_CHARACTERS = 32
_NUM_BYTES = 32  # length of a new secret and of a derived key
_OPERATOR_KEY = "baton-operator-"
_MAX_SECRETS = 8
_NO_FILE = (errno.ENOENT, errno.ENAMETOOLONG)
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SecretKeys:
    """Keys by role, the signing key first.

    Without the key of a role, a process can neither act in that role nor verify it.
    """

    keys: Mapping[Role, tuple[bytes, ...]] = field(repr=False)


class SecretStore(Protocol):
    """Source of the current keys, which a rotation changes."""

    def current(self) -> SecretKeys: ...


def new_secret() -> str:
    """Return a new secret: 32 random bytes, in characters that need no quoting."""
    return secrets.token_urlsafe(_NUM_BYTES)


def operator_keys(keyring: SecretKeys) -> tuple[str, ...]:
    """Return the operators' keys derived from each secret, in the order of the secrets."""
    return tuple(
        _OPERATOR_KEY + base64.urlsafe_b64encode(key).rstrip(b"=").decode()
        for key in keyring.keys["operator"]
    )


def keyrings(file: Path | None, role: Role) -> SecretStore | None:
    """Return the source of keys: `file`, or the variable BATON_SECRET. None: there is neither.

    Args:
        role: role for which a key is needed.
    Raises:
        ConfigError: the file is unreadable, the secret is invalid, or there is only an operator's
            key and `role` needs more.
    """
    if file is not None:
        return WatchedFiles(
            [file], lambda: _of_file(file, role), what="cluster secrets", setting="--secret-file"
        )
    text = os.environ.get(VARIABLE)
    return None if text is None else _Fixed(parse(text, VARIABLE, role))


def parse(text: str, source: str, role: Role) -> SecretKeys:
    """Parse secrets.

    Args:
        text: secrets or operators' keys, separated by white space. The first one signs.
        source: origin of the text, for messages, which never contain the text.
        role: role for which a key is needed.
    Raises:
        ConfigError: there is no key, one is short or malformed, or there are too many.
    """
    words = text.split()
    if not 0 < len(words) <= _MAX_SECRETS:
        raise ConfigError(f"{source} has {len(words)} secrets, expected 1 to {_MAX_SECRETS}")
    keys: dict[Role, tuple[bytes, ...]] = dict.fromkeys(ROLES, ())
    for number, word in enumerate(words, 1):
        if word.startswith(_OPERATOR_KEY):
            keys["operator"] += (_of_operator(word, f"{source}: operator's key {number}"),)
            continue
        if len(word) < MIN_CHARACTERS:
            raise ConfigError(
                f"{source}: secret {number} has {len(word)} characters, expected {MIN_CHARACTERS} "
                "or more; `baton cluster-secret` prints a new one"
            )
        for each in ROLES:
            keys[each] += (_derived(word, each),)
    if not keys[role]:
        raise ConfigError(f"{source} has only an operator's key: a {role} needs the secret")
    return SecretKeys(keys)


@dataclass(frozen=True, slots=True)
class _Fixed:
    keyring: SecretKeys

    def current(self) -> SecretKeys:
        return self.keyring


def _of_file(file: Path, role: Role) -> SecretKeys:
    try:
        with file.open("rb") as content:
            read = content.read(_MAX_FILE_BYTES + 1)
        if len(read) > _MAX_FILE_BYTES:
            raise ConfigError(f"{file} is longer than {_MAX_FILE_BYTES} bytes")
        return parse(read.decode("ascii"), str(file), role)
    except OSError as error:
        raise ConfigError(f"--secret-file: {unread(file, error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--secret-file: {file} is not ASCII text") from error
    except ConfigError as error:
        raise ConfigError(f"--secret-file: {error}") from error


def unread(file: Path, error: OSError) -> str:
    """Return why a secret file is unreadable.

    The path of a missing file is not shown if it could be the secret itself.
    """
    path = str(file)
    if error.errno in _NO_FILE and len(path) >= MIN_CHARACTERS and "/" not in path:
        return f"the path of {len(path)} characters is not a file: {error.strerror}"
    return f"{path}: {error.strerror}"


def _derived(secret: str, role: Role) -> bytes:
    """Return a role's key, derived from a secret by HMAC (RFC 5869, 3.3: the secret is random)."""
    return hmac.digest(secret.encode(), f"baton {role} key, version 1".encode(), "sha256")


def _of_operator(word: str, source: str) -> bytes:
    text = word.removeprefix(_OPERATOR_KEY)
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        key = b""
    if len(key) != _NUM_BYTES:
        raise ConfigError(f"{source} is incomplete")
    return key
