"""The file of API keys: identity, role and limits. It holds hashes instead of keys.

A key is 256 random bits from `baton api-key`, so plain SHA-256 protects it. Slow hashes are for
secrets that people choose.
"""

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AwareDatetime,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from common.config import ConfigRecord, Positive, Priority
from common.errors import ConfigError
from common.limits import MAX_WEIGHT, MIN_WEIGHT

PREFIX = "baton-"  # lets secret scanners recognise keys
MAX_FILE_BYTES = 4 << 20
MAX_KEYS = 10_000

_DATE = re.compile(r"\d{4}-\d\d-\d\d")

Role = Literal["client", "operator"]


class KeyLimits(ConfigRecord):
    """Limits of one key in one router process. None: no limit of its own."""

    requests_per_minute: Positive | None = Field(
        None, description="maximum requests a minute (no limit)"
    )
    tokens_per_minute: Positive | None = Field(
        None, description="maximum prompt and output tokens a minute (no limit)"
    )
    concurrent: Positive | None = Field(None, description="maximum running requests (no limit)")
    connections: Positive | None = Field(
        None, description="maximum open HTTP connections (no limit)"
    )


def _moment(value: Any) -> Any:
    """Convert a date to its first moment in UTC."""
    if isinstance(value, str) and _DATE.fullmatch(value):
        value = date.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time.min, UTC)
    return value


class KeyEntry(ConfigRecord):
    """One API key in the file."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$", description="name in metrics and logs"
    )
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the whole key, in hex")
    role: Role = Field("client", description="client or operator")
    expires: Annotated[AwareDatetime, BeforeValidator(_moment)] | None = Field(
        None, description="date from which the key is rejected (never)"
    )
    weight: float = Field(
        1.0,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="share of a busy router, relative to other keys (1)",
    )
    priority: Priority | None = Field(
        None,
        description="Highest priority of its requests, also their default priority. Default: "
        "--clients.priority",
    )
    limits: KeyLimits = KeyLimits()


class _File(ConfigRecord):
    keys: tuple[KeyEntry, ...] = Field(min_length=1, max_length=MAX_KEYS)

    @model_validator(mode="after")
    def _each_once(self) -> "_File":
        for field in ("name", "sha256"):
            seen: set[str] = set()
            for entry in self.keys:
                value = getattr(entry, field)
                if value in seen:
                    raise ValueError(f"two keys have the {field} {value}")
                seen.add(value)
        return self


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """Return the hash of a key in the form that the file uses."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def entry_text(entry: KeyEntry) -> str:
    """Return an entry as lines to append to the file."""
    content = entry.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump([content], sort_keys=False)


def read(file: Path) -> Sequence[KeyEntry]:
    """Read the file of API keys.

    Raises:
        ConfigError: the file cannot be read or is invalid. The message is one sentence.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} has more than {MAX_FILE_BYTES} bytes")
    try:
        entries = _parsed(content)
    except ValueError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{file} is not a list of keys")
    try:
        return _ADAPTER.validate_python({"keys": entries}).keys
    except ValidationError as error:
        raise ConfigError(f"{file}: {_sentence(error)}") from error


# Both loaders are safe. The C loader is ten times faster, but crashes the process on deeply nested
# lists.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 64
_ADAPTER = TypeAdapter(_File)


def _parsed(content: bytes) -> Any:
    """Parse YAML. Raise ValueError with a one-line message for invalid YAML."""
    depth = 0
    try:
        for event in yaml.parse(content, _LOADER):
            match event:
                case yaml.CollectionStartEvent():
                    depth += 1
                case yaml.CollectionEndEvent():
                    depth -= 1
            if depth > _MAX_DEPTH:
                raise ValueError("it is nested too deeply")
        return yaml.load(content, _LOADER)
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # PyYAML has its own limit since 6.0.4
            raise ValueError("it is nested too deeply") from error
        raise ValueError(" ".join(str(error).split())) from error
    # PyYAML raises these for values that do not match an explicit tag, such as !!int "".
    except (LookupError, AttributeError) as error:
        raise ValueError(f"a value does not match its YAML tag: {error}") from error


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    match first["loc"]:
        case ("keys", int(index), *rest):
            where = " ".join([f"key {index + 1}", ".".join(map(str, rest))]).strip() + ": "
        case _:
            where = ""
    return where + first["msg"].removeprefix("Value error, ")
