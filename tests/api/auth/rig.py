"""Files of API keys, and routers that require them."""

import asyncio
from pathlib import Path
from typing import Any

import yaml

from api.auth import api_keys
from common.config import ClientsConfig
from tests.api.rig import COMPLETIONS, Api
from tests.support.network.http_client import Response, post

NOBODY = ["127.0.0.1:1"]  # a decode node that does not exist
KEYS = {name: f"{api_keys.PREFIX}{name * 9}" for name in ("alice", "bob", "old", "op")}


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": api_keys.hashed(KEYS[name]), **fields}


def write(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(list(entries)))
    return file


def clients_of(directory: Path, *entries: dict[str, Any], **config: Any) -> ClientsConfig:
    """Clients with the keys of these entries."""
    return ClientsConfig(api_keys=write(directory / "keys.yaml", *entries), **config)


def bearer(name: str) -> str:
    return f"Bearer {KEYS[name]}"


def ask_as(name: str, api: Api, **fields: Any) -> "asyncio.Task[Response]":
    """Request a completion as the client of this name."""
    content = {"prompt": "x", **fields}
    asked = post(api.router.http_port, COMPLETIONS, content, authorization=bearer(name))
    return asyncio.create_task(asked)
