"""Every knob of every program, from the records that hold them."""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from common.config import DecodeConfig, PrefillConfig, RouterConfig

_PROGRAMS = {
    "Router": RouterConfig,
    "Prefill node": PrefillConfig,
    "Decode node": DecodeConfig,
}
_HEAD = """# Configuration

Each knob can be set in three ways. A flag goes before an environment variable, and that before the
file given with `--config`.

| | |
|---|---|
| flag | `--engine.cache.page-size 32` |
| environment | `BATON_ENGINE__CACHE__PAGE_SIZE=32` |
| file | `engine: {cache: {page_size: 32}}` |

A flag such as `--no-engine.cuda-graphs` switches off what is `True`; the other two say `false`.
"""


def page() -> str:
    parts = [_HEAD]
    for title, record in _PROGRAMS.items():
        parts.append(f"\n## {title}\n\n| flag | default | |\n|---|---|---|\n")
        parts += [_row(knob) for knob in _knobs(record, PydanticUndefined, "")]
    return "".join(parts)


class _Knob(NamedTuple):
    path: str
    default: object
    about: str


def _knobs(record: type[BaseModel], defaults: object, prefix: str) -> Iterator[_Knob]:
    """Fields that are no records themselves; a record's own ones come first.

    Args:
        defaults: what the whole record is by default, if it has one: a node's port, say, is the
            default of its front and not of the field.
    """
    nested: list[tuple[type[BaseModel], object, str]] = []
    for name, field in record.model_fields.items():
        default = getattr(defaults, name, field.default)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested.append((kind, default, f"{prefix}{name}."))
        else:
            yield _Knob(prefix + name, default, field.description or "")
    for inner in nested:
        yield from _knobs(*inner)


def _row(knob: _Knob) -> str:
    flag = knob.path.replace("_", "-")
    about = knob.about.replace("|", "\\|")
    return f"| `--{flag}` | {_default(knob.default)} | {about} |\n"


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    return "" if value in (None, ()) else f"`{value}`"
