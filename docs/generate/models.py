"""Generate the tables of docs/models.md from the results of `docs.generate.architectures`.

`python -m docs.generate.models` replaces the end of the page, from the first table on.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "models.md"
FOUND = Path(__file__).with_name("architectures.jsonl")
_TABLE = """## Every class of transformers

The tables list every class of transformers {version} under `AutoModelForCausalLM`. **{served} of
{all} classes produce the same tokens as their own full forward pass** and are therefore supported.
`python -m docs.generate.architectures` tests them:

1. The command creates a tiny checkpoint with random weights for each class. Models of the BERT
   family are configured as decoders (`is_decoder`).
2. A prefill node and a decode node in one process generate tokens with this checkpoint, in float32
   on a CPU, with and without a cached prefix.
3. The command compares these tokens with those of the class without Baton.
4. The command repeats this with two tensor-parallel [ranks](parallel.md). {divided} classes produce
   the same tokens. The other classes have no plan to divide their layers, so nodes with several
   ranks reject them.

| model_type | class | also with 2 ranks | also native |
|---|---|---|---|
"""
_REST = """
### Classes without support

A node rejects these classes with the reason in the last column, unless a native family serves them.

| model_type | class | reason |
|---|---|---|
"""

_PLAIN = str.maketrans("|;", "/,")  # in messages of other programs


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as it is, with the tables of these results."""
    served = [one for one in found if one["asked"] and one["same"] == one["asked"]]
    others = [one for one in found if one not in served]
    version = max((one["transformers"] for one in found), default="")
    divided = sum(not one["ranks"] for one in served)
    table = _TABLE.format(version=version, served=len(served), all=len(found), divided=divided)
    head = FILE.read_text().partition(_TABLE.partition("\n")[0])[0]
    return "".join((head, table, *_rows(served), _REST, *_reasons(others), _END))


_END = """
`python -m docs.generate.models` generates these tables from `docs/generate/architectures.jsonl`.
"""


def _rows(served: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in served:
        native, ranks = "yes" if one["native"] else "no", "no" if one["ranks"] else "yes"
        yield f"| {one['kind']} | {one['name']} | {ranks} | {native} |\n"


def _reasons(others: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in others:
        if one["native"]:
            yield f"| {one['kind']} | {one['name']} | supported natively |\n"
            continue
        reason = one["reason"] or f"{one['same']} of {one['asked']} tokens are identical"
        yield f"| {one['kind']} | {one['name']} | {reason.translate(_PLAIN)} |\n"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FOUND.read_text().splitlines()]


if __name__ == "__main__":
    FILE.write_text(page(read()))
