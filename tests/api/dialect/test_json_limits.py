"""JSON bodies that would be too expensive to decode are rejected, and all plausible ones
accepted."""

import json

import msgspec
import pytest

from api.dialect.bodies import MAX_NAMED, MAX_NUMBERS, check_structure
from api.dialect.problems import ApiError

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": 'Says "hello", and [more].',
        "parameters": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(10)},
            "required": ["p1"],
        },
    },
}


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": [[152_000] * 4096] * 128},
        {"prompt": [152_000] * 1_000_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 4096},
        {"messages": [{"role": "user", "content": "x" * 200}] * 4096, "tools": [TOOL] * 300},
        {"prompt": '{"a": [1, 2, "b"], "c": {}}, ' * 200_000},
        {"prompt": 'C:\\\\dir\\", [{' * 400_000},
        {"prompt": ["\\", '"', '\\"'] * 20, "suffix": "\\" * 999_999},
        {"prompt": ",[{" * 1_000_000},
    ],
    ids=["lists of ids", "ids", "parts", "tools", "JSON", "escapes", "ends", "separators"],
)
def test_plausible_bodies_are_accepted(content):
    check_structure(msgspec.json.encode(content))
    check_structure(json.dumps(content, indent=1).encode())


@pytest.mark.parametrize(
    "item, num",
    [
        ("[]", MAX_NAMED),
        ("{}", MAX_NAMED),
        ('""', MAX_NAMED),
        ('"\\\\"', MAX_NAMED),
        ('"\\""', MAX_NAMED),
        ('"\\\\\\""', MAX_NAMED),
        ('{"":0}', MAX_NAMED // 2),
        ("1", MAX_NUMBERS + MAX_NAMED + 2),
    ],
)
def test_too_many_values_are_rejected(item, num):
    body = '{"prompt":[' + ",".join([item] * num) + "]}"
    with pytest.raises(ApiError, match="too many values") as refused:
        check_structure(body.encode())
    assert refused.value.status == 413
