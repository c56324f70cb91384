"""Invalid configurations: files, flags and environment variables of every kind.

With any content, a program starts with a valid configuration or ends with one line and exit code 2.
"""

import asyncio
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import yaml

from common.config import DecodeConfig, PrefillConfig, RouterConfig
from common.settings import ENV_PREFIX, read
from tests.attack.random_messages import mutated
from tests.attack.target import Target

NUM_WORKERS = 1

_RECORDS = (PrefillConfig, DecodeConfig, RouterConfig)
_NAMES = (
    *("front", "engine", "transfer", "cache", "scheduler", "tls", "model", "port", "host", "mode"),
    *(
        "page_size",
        "policy",
        "prefill",
        "decode",
        "budget_s",
        "otlp_endpoint",
        "x",
        "",
        "__class__",
    ),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**30, 1.5, float("nan"), "", "auto", "a" * 10_000, "\x00", [], {}),
    *([1, 2], ["a"], "127.0.0.1:1,b:2", "[1,", "{", "none", "dns:x:1", "file:/nowhere", b"\xff"),
)
_TEXTS = (
    *(
        "1: 2",
        "[a]",
        "? [a, b]\n: c",
        "a: &a [*a]",
        "front: {1: 2}",
        "!!python/object:os.system {}",
    ),
    *("[" * 5000, "{a: " * 3000, "\t", "\x00", "front: {tls: {cert: [", "%YAML 9.9\n---\na: 1"),
    "&a [&b [&c [1]]]",
)


async def file(target: Target, draw: Random) -> None:
    _check(draw, yaml.safe_dump(_tree(draw, 0)).encode("utf-8", "surrogatepass"), [], {})


async def broken_file(target: Target, draw: Random) -> None:
    _check(draw, mutated(draw.choice(_TEXTS).encode(), draw), [], {})


async def flags(target: Target, draw: Random) -> None:
    given = [f"--{_setting(draw, '.')}={draw.choice(_VALUES)}" for _ in range(draw.randint(0, 4))]
    given += draw.choices(
        ("--config", "--", "-x", "--model", "--no-model", "a"), k=draw.randrange(3)
    )
    _check(draw, None, given, {})


async def variables(target: Target, draw: Random) -> None:
    given = {
        f"{ENV_PREFIX}{_setting(draw, '__').upper()}": str(draw.choice(_VALUES)).replace("\x00", "")
        for _ in range(draw.randint(0, 4))
    }
    _check(draw, None, [], given)
    await asyncio.sleep(0)


def _check(
    draw: Random, content: bytes | None, flags: list[str], variables: dict[str, str]
) -> None:
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as directory, _environment(variables):
        path = Path(directory, "baton.yaml")
        if content is not None:
            path.write_bytes(content)
            flags = [*flags, f"--config={path}"]
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                read(draw.choice(_RECORDS), "baton", ["--model=m", *flags])
        except SystemExit as end:
            code = end.code
        else:
            return
    assert code in (0, 2), f"exit code {code} of {flags} {variables} {content!r}"
    assert said.getvalue().count("\n") <= 1, said.getvalue()


def _tree(draw: Random, depth: int) -> Any:
    if depth > 3 or draw.random() < 0.3:
        return draw.choice(_VALUES)
    keys = [draw.choice((*_NAMES, 1, None, True)) for _ in range(draw.randint(0, 4))]
    return {key: _tree(draw, depth + 1) for key in keys}


def _setting(draw: Random, joint: str) -> str:
    return joint.join(name for name in draw.choices(_NAMES, k=draw.randint(1, 3)) if name) or "x"


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
