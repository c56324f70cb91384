"""Files of API keys, and routers that ask for them."""

from pathlib import Path
from typing import Any

import yaml

from api.auth import api_keys

WAIT_S = 60.0
NOBODY = ["127.0.0.1:1"]  # a decode node that is not there
KEYS = {name: f"{api_keys.PREFIX}{name * 9}" for name in ("alice", "bob", "old", "op")}


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": api_keys.hashed(KEYS[name]), **fields}


def write(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(list(entries)))
    return file


def bearer(name: str) -> str:
    return f"Bearer {KEYS[name]}"
