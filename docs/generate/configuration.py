"""Generates the configuration reference from the records in common/config."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from common.config import DecodeConfig, EncodeConfig, PrefillConfig, RankHostConfig, RouterConfig
from common.settings import ENV_PREFIX, SHORT_NAMES

_COMPONENTS = {
    "router": ("Router", RouterConfig),
    "prefill": ("Prefill node", PrefillConfig),
    "decode": ("Decode node", DecodeConfig),
    "encode": ("Encode node", EncodeConfig),
    "rank-host": ("Rank host", RankHostConfig),
}
_HEAD = """# Configuration reference

Each setting can be given in three ways. A flag overrides an environment variable. A variable
overrides the file that `--config` names.

| source | example |
|---|---|
| flag | `--engine.cache.page-size 32` |
| environment variable | `BATON_ENGINE__CACHE__PAGE_SIZE=32` |
| file | `engine: {cache: {page_size: 32}}` |

A flag such as `--no-engine.cuda-graphs` switches off a setting that is `True` by default. In a
variable or file write `false`. A wrong value ends the process with exit code 2 and one line. The
line names the flag, variable or file entry.

Each row has an anchor: `#router-policy`, `#decode-engine-cache-page-size`.
"""


def page() -> str:
    parts = [_HEAD]
    for component, (title, record) in _COMPONENTS.items():
        parts.append(f"\n## {title}\n")
        parts += _group(record, PydanticUndefined, component, "")
    return "".join(parts)


def _group(record: type[BaseModel], defaults: object, component: str, prefix: str) -> Iterator[str]:
    """Yield the table of a record's own settings, then the tables of its nested records.

    Args:
        defaults: the default of the whole record, if it has one. A node's port, for example, is
            a default of its `server` and not of the field.
    """
    schema = record.model_json_schema()
    nested, rows = [], []
    for name, field in record.model_fields.items():
        default = getattr(defaults, name, field.default)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            nested.append((kind, default, component, f"{prefix}{name}."))
        else:
            about = (field.description or "").replace("|", "\\|")
            names = _names(component, prefix + name)
            type_ = _type(schema["properties"][name])
            rows.append(f"| {names} | {type_} | {_default(default)} | {about} |\n")
    if prefix:
        path = prefix.removesuffix(".")
        yield f"\n### {component}: {path} {{#{_anchor(component, path)}}}\n"
    if rows:
        yield "\n| setting | type and choices | default | description |\n|---|---|---|---|\n"
        yield from rows
    for inner in nested:
        yield from _group(*inner)


def _anchor(component: str, path: str) -> str:
    return f"{component}-{path}".replace(".", "-").replace("_", "-")


def _names(component: str, path: str) -> str:
    """Return the anchor, the flag, its short name and the environment variable of a setting."""
    flag = path.replace("_", "-")
    short = f" or `--{SHORT_NAMES[flag]}`" if flag in SHORT_NAMES else ""
    variable = ENV_PREFIX + path.upper().replace(".", "__")
    return f'<a id="{_anchor(component, path)}"></a>`--{flag}`{short}<br>`{variable}`'


def _type(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"anyOf": options}:
            return next(_type(option) for option in options if option.get("type") != "null")
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}"
        case {"$ref": _}:
            return "objects"
        case {"format": "path"}:
            return "path"
        case {"type": kind}:
            return str(kind) + _range(schema)
    raise ValueError(f"a setting of an unknown type: {schema}")


def _range(schema: Mapping[str, Any]) -> str:
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    said = [f"{words} {schema[key]:.15g}" for key, words in bounds.items() if key in schema]
    return ", ".join(["", *said])


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    return "unset" if value in (None, (), "") else f"`{value}`"
