"""Clients by their API keys, reloaded when the file changes."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from api.auth import api_keys
from api.auth.api_keys import KeyEntry
from api.auth.client import Client
from api.auth.usage import KeyUsage
from common.errors import ConfigError
from common.watched_files import WatchedFiles
from router.metrics import ApiKeyMetrics

LOOK_EVERY_S = 1.0


class ActiveKey(NamedTuple):
    """The client of one key, and the key's expiry."""

    client: Client
    expires: datetime | None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


class ApiKeys:
    """Clients by API key. For one event loop.

    A key that is removed from the file is rejected from then on. Its running requests continue.
    """

    def __init__(self, file: Path, *, salt_by_key: bool = False) -> None:
        """
        Args:
            salt_by_key: whether each key has namespaces of its own.
        Raises:
            ConfigError: the file cannot be used.
        """
        self._files = WatchedFiles([file], lambda: _read(file), what="API keys", knob="--api-keys")
        self._salt_by_key = salt_by_key
        self._entries: Sequence[KeyEntry] = ()
        self._by_hash: Mapping[str, ActiveKey] = {}
        self._usages: Mapping[str, KeyUsage] = {}
        self._take(self._files.current())

    def __len__(self) -> int:
        return len(self._by_hash)

    async def watch(self) -> None:
        """Reload the file when it changes.

        Never returns. Parsing thousands of keys runs in a thread.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._take(await asyncio.to_thread(self._files.current))

    def find(self, key: str) -> ActiveKey | None:
        """Return the client of a key, or None if there is no such key.

        The lookup time can reveal parts of a key's hash at most, and a key cannot be derived from a
        hash.
        """
        return self._by_hash.get(api_keys.hashed(key))

    def usage(self) -> Mapping[str, ApiKeyMetrics]:
        """Return the metrics of each key, by its name. Safe to call from any thread."""
        return {
            name: ApiKeyMetrics(
                usage.num_requests,
                usage.num_refused,
                usage.num_prompt_tokens,
                usage.num_generated_tokens,
            )
            for name, usage in self._usages.items()
        }

    def _take(self, entries: Sequence[KeyEntry]) -> None:
        if entries is self._entries:
            return
        self._entries = entries
        usages: dict[str, KeyUsage] = {}
        by_hash: dict[str, ActiveKey] = {}
        for entry in entries:
            usage = self._usages.get(entry.name) or KeyUsage(entry.limits)
            usage.limit(entry.limits)
            usages[entry.name] = usage
            client = Client(
                entry.name,
                usage,
                entry.limits,
                entry.weight,
                operator=entry.role == "operator",
                namespaces_of=entry.name if self._salt_by_key else "",
                priority=entry.priority,
            )
            by_hash[entry.sha256] = ActiveKey(client, entry.expires)
        self._usages, self._by_hash = usages, by_hash


def _read(file: Path) -> Sequence[KeyEntry]:
    try:
        return api_keys.read(file)
    except ConfigError as error:
        raise ConfigError(f"--api-keys: {error}") from error
