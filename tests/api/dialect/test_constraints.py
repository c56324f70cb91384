"""All notations of an output constraint become one grammar. Unsupported ones are rejected by
name."""

from typing import Any

from tests.api.rig import CHAT, COMPLETIONS, Api

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'


async def _sent(api: Api, **fields: Any) -> Any:
    path = CHAT if "messages" in fields else COMPLETIONS
    return await api.guide_of(path, **fields)


FORMS = [
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "json_schema",
        TEXT,
    ),
    ({"guided_json": SCHEMA}, "json_schema", TEXT),
    ({"guided_json": TEXT}, "json_schema", TEXT),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
    ({"json_schema": TEXT}, "json_schema", TEXT),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"regex": "a+"}, "regex", "a+"),
    ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"guided_choice": ["yes", 'no "no"']}, "ebnf", r'root ::= "yes" | "no \"no\""'),
    ({"structured_outputs": {"choice": ["a"]}}, "ebnf", 'root ::= "a"'),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        "structural_tag",
        '{"type":"structural_tag","format":{"type":"any_text"}}',
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
        "structural_tag",
        '{"type":"structural_tag","structures":[],"triggers":["<"]}',
    ),
    ({"structured_outputs": {"structural_tag": TEXT}}, "structural_tag", TEXT),
    ({"structural_tag": SCHEMA}, "structural_tag", TEXT),
    ({"response_format": {"type": "text"}}, None, None),
    ({}, None, None),
]


async def test_a_constraint_reaches_the_node_in_the_written_order(api):
    for fields, kind, text in FORMS:
        guide = await _sent(api, prompt="x", **fields)
        assert guide.WhichOneof("form") == kind
        assert kind is None or getattr(guide, kind) == text


NO_FORMS = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"guided_json": SCHEMA, "regex": "a"}, "guided_json"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ({"guided_regex": "a" * 65537}, "guide"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
]


async def test_an_invalid_constraint_is_rejected_by_name(api):
    for fields, param in NO_FORMS:
        answer = await api.post(COMPLETIONS, prompt="x", **fields)
        assert answer.status == 400, answer.body
        assert param in (answer.error["param"] or answer.error["message"])
