"""Schemas with a large `oneOf`: constants, objects, and both nested."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

from tests.attack.posts import complete
from tests.attack.target import Target

NUM_WORKERS = 3

Schema: TypeAlias = dict[str, Any]


async def constants(target: Target, draw: Random) -> None:
    await _enforce(target, draw, lambda n: {"const": f"{n:06d}"}, (500, 3000))


async def objects(target: Target, draw: Random) -> None:
    """Branches that differ only in one constant property: 141 may be compared."""
    await _enforce(target, draw, _object, (100, 141, 142, 600))


async def nested(target: Target, draw: Random) -> None:
    """Each branch has another large `oneOf`."""

    def branch(number: int) -> Schema:
        below = {"oneOf": [_object(n) for n in range(60)]}
        return _object(number, below=below)

    await _enforce(target, draw, branch, (4, 12))


async def equal_at_last(target: Target, draw: Random) -> None:
    """Only the last two branches can match at the same time."""
    await _enforce(target, draw, lambda n: _object(n), (139,), _object(0))


def _object(number: int, **properties: Schema) -> Schema:
    kind = {"kind": {"const": number}, **properties}
    return {"type": "object", "properties": kind, "required": list(kind)}


async def _enforce(
    target: Target,
    draw: Random,
    branch: Callable[[int], Schema],
    counts: tuple[int, ...],
    *more: Schema,
) -> None:
    first = draw.randrange(1000)  # so that no schema is in a node's cache
    branches = [branch(first + number) for number in range(draw.choice(counts))]
    schema = {"oneOf": [*branches, *more]}
    await complete(target, guided_json=schema, max_tokens=64)
