"""Every complete response is valid for its schema. Unsupported schemas are rejected with the
place."""

import json
from collections.abc import Iterator
from datetime import datetime, time

import pytest
from grpc import StatusCode
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator, FormatChecker
from jsonschema.protocols import Validator
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.requests.sampling import GuidedDecoding
from engine.grammar.schemas import enforced as enforced_module
from engine.grammar.schemas.enforced import enforced
from tests.pair.features.schemas import SCHEMAS
from tests.pair.rig import Loaded, PairRig, Size

FORMATS = FormatChecker()
CLOSING = '"]}'


@FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or bool(time.fromisoformat(value))


@FORMATS.checks("date-time", raises=ValueError)
def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.fromisoformat(value))


def _validator(schema: object) -> Validator:
    """Return a validator for the schema's draft."""
    text = json.dumps(schema)
    if "draft-04" in text:
        draft = Draft4Validator
    else:
        draft = Draft7Validator if '"items": [' in text else Draft202012Validator
    return draft(schema, format_checker=FORMATS)


def _answers(
    noise: tuple[Loaded, Tokenizer], names: list[str], seeds: range
) -> Iterator[tuple[str, str | None]]:
    """Yield each schema with its response, or None if the response did not end.

    A bias on closing tokens makes most responses of random weights end.
    """
    loaded, tokenizer = noise
    bias = tuple((tokenizer.token_to_id(sign), 4.0) for sign in CLOSING)
    with PairRig(
        loaded,
        prefill=(),
        decode=[Size(num_pages=1024, max_running_requests=64, max_queued_requests=4096)],
        mode="colocated",
    ) as rig:
        for first in range(0, len(names), 48):
            asked = [
                (
                    name,
                    rig.ask(
                        range(40, 50),
                        300,
                        guide=GuidedDecoding("json_schema", json.dumps(SCHEMAS[name])),
                        ignore_eos=False,
                        temperature=1.0,
                        seed=seed,
                        logit_bias=bias,
                    ),
                )
                for name in names[first : first + 48]
                for seed in seeds
            ]
            rig.run()
            for name, one in asked:
                assert one.ended.error == "", f"{name}: {one.ended.error}"
                whole = one.reason.name == "STOP"
                yield name, tokenizer.decode(one.tokens) if whole else None


def _check(answers: Iterator[tuple[str, str | None]]) -> None:
    ended, cut = 0, []
    for name, text in answers:
        if text is None:
            cut.append(name)
            continue
        ended += 1
        wrong = [error.message for error in _validator(SCHEMAS[name]).iter_errors(json.loads(text))]
        assert not wrong, f"{name}: {text} {wrong}"
    assert ended > 9 * len(cut), cut


def test_responses_of_one_schema_in_sixteen_are_valid(noise: tuple[Loaded, Tokenizer]) -> None:
    """Seen failing with schemas that are passed to xgrammar unchanged."""
    _check(_answers(noise, list(SCHEMAS)[::16], range(2)))


@pytest.mark.long
def test_responses_of_every_schema_are_valid(noise: tuple[Loaded, Tokenizer]) -> None:
    assert len(SCHEMAS) >= 200
    _check(_answers(noise, list(SCHEMAS), range(4)))


REFUSED = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "#: uniqueItems"),
    "where": ({"properties": {"a": {"items": {"not": {}}}}}, "#/properties/a/items: not"),
    "contains": ({"contains": {"const": 5}}, "#: contains"),
    "if": ({"type": "object", "if": {}, "then": {}}, "#: if"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "#: dependentRequired"),
    "steps": ({"type": "number", "multipleOf": 0.5}, "multipleOf 0.5"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "branches 0 and 1"),
    "length of a pattern": ({"pattern": "^a*$", "maxLength": 3}, "pattern and maxLength"),
    "length of a format": ({"format": "email", "maxLength": 8}, "format and maxLength"),
    "format": ({"type": "string", "format": "regex"}, "format 'regex'"),
    "lookahead": ({"pattern": "^(?=a)b$"}, "character 1 of"),
    "boundary": ({"pattern": r"^a\b$"}, r"\b is not supported, at character 2"),
    "back reference": ({"pattern": r"(a)\1"}, r"\1 is not supported"),
    "anchor in the midst": ({"pattern": "a^b"}, "^ is only supported at the start, at character 1"),
    "a quote": ({"pattern": '^"$'}, "characters that JSON escapes"),
    "out of it": ({"$ref": "https://x.y/z"}, "refers outside the schema"),
    "to nothing": ({"items": {"$ref": "#/$defs/a"}}, "#/items: $ref '#/$defs/a' does not exist"),
    "to itself": ({"$ref": "#"}, "refers to itself"),
    "grows": (
        {"$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n", "minProperties": 0}}}}}
        | {"$ref": "#/$defs/n"},
        "too many nested schemas",
    ),
    "false": (False, "the schema false allows no value"),
    "of no type": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no type is valid"),
    "limits": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum is above"),
    "type": ({"type": "nonsense"}, "type 'nonsense'"),
    "no schema": ({"properties": 3}, "not a valid JSON schema"),
    "two names of patterns": (
        {"patternProperties": {"^a": {}, "b$": {}}, "additionalProperties": False},
        "patternProperties",
    ),
}


@pytest.mark.parametrize("schema, where", REFUSED.values(), ids=list(REFUSED))
def test_an_unsupported_schema_is_rejected_with_the_place(schema: object, where: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        enforced(json.dumps(schema))
    assert where in str(refused.value)


def test_a_rejection_reaches_the_client_and_an_empty_grammar_is_one(
    noise: tuple[Loaded, Tokenizer],
) -> None:
    loaded, _ = noise
    guides = {
        GuidedDecoding("json_schema", '{"items": {"uniqueItems": true}}'): "#/items: uniqueItems",
        GuidedDecoding("json_schema", '{"type": "integer", "maximum": 1e30}'): "Integer exceeds",
        GuidedDecoding("regex", "a(?=b)"): "character 1 of",
        GuidedDecoding("ebnf", "root ::= root"): "no response can match it",
    }
    with PairRig(loaded) as rig:
        asked = [(rig.ask(range(40, 50), 8, guide=guide), where) for guide, where in guides.items()]
        rig.run()
        for one, where in asked:
            assert one.ended.error_code == StatusCode.INVALID_ARGUMENT.value[0]
            assert where in one.ended.error, one.ended.error


def test_constants_of_one_of_are_compared_as_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair of constants is compared. Seen failing with a comparison of all pairs."""

    def compared(*_: object) -> bool:
        raise AssertionError("two branches are compared")

    monkeypatch.setattr(enforced_module, "disjoint", compared)
    values = [*range(2000), *map(str, range(500)), True, None, 0.5, [1], [True], {"a": 1}]
    schema = {"oneOf": [{"const": value} for value in values]}
    assert len(json.loads(enforced(json.dumps(schema)))["anyOf"]) == len(values)


@pytest.mark.parametrize("values", [(1, 1.0), ({"a": [1]}, {"a": [1.0]}), ("a", "b", "a")])
def test_equal_constants_in_one_of_are_rejected(values: tuple[object, ...]) -> None:
    schema = {"oneOf": [{"const": value} for value in values]}
    with pytest.raises(InvalidRequest, match=f"branches 0 and {len(values) - 1}"):
        enforced(json.dumps(schema))


def test_other_branches_of_one_of_are_limited() -> None:
    def branch(number: int) -> object:
        return {"type": "object", "properties": {"k": {"const": number}}, "required": ["k"]}

    enforced(json.dumps({"oneOf": [branch(number) for number in range(100)]}))
    with pytest.raises(InvalidRequest, match="142 of its 142 branches are not constants"):
        enforced(json.dumps({"oneOf": [branch(number) for number in range(142)]}))
