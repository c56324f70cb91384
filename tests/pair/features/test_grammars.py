"""Responses that follow a grammar, whichever node samples and whatever happens to the request."""

import itertools
import json
import re
import threading

import msgspec
import pytest
from grpc import StatusCode

from api.parsers.harmony import CHANNEL, CONSTRAIN, MESSAGE, START, Channels
from api.parsers.harmony import END as END_MARKER
from common.requests.sampling import JSON_OBJECT, GuidedDecoding, ReasoningTokens, as_form, tag
from engine.grammar import matching
from engine.grammar.matching import Match
from tests.pair.rig import PairRig, Size

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = GuidedDecoding("json_schema", json.dumps(SCHEMA))
DATE = GuidedDecoding("regex", "[0-9]{4}-[01][0-9]")
ANSWER = GuidedDecoding("ebnf", 'root ::= "yes" | "no" | "perhaps not"')
GUIDES = (PERSON, DATE, ANSWER)
TAG = GuidedDecoding(
    "structural_tag",
    json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [
                    {
                        "begin": "<a>",
                        "content": {"type": "regex", "pattern": "[a-c]{2}"},
                        "end": "</a>",
                    }
                ],
                "stop_after_first": True,
            },
        }
    ),
)
END = 258  # cost of a token for the noise model
PROMPTS = [list(range(40, 40 + length)) for length in (1, 15, 64, 150)]


def _holds(guide, text):
    match guide.kind:
        case "json_schema":
            person = json.loads(text)
            assert set(person) == {"name", "age", "tags"}
            return len(person["name"]) <= 5 and 0 <= person["age"] <= 99 and len(person["tags"]) < 3
        case "regex":
            return re.fullmatch(guide.text, text)
        case "ebnf":
            return text in ("yes", "no", "perhaps not")
        case _:
            return json.loads(text) is not None


def _no_spaces(tokenizer):
    """Return a bias against spaces, which random weights prefer to JSON."""
    return tuple((tokenizer.token_to_id(name), -100.0) for name in "ĠĊĉč")


def _asked(rig, tokenizer):
    """Start a greedy and a sampled request of every grammar."""
    samplings = ({}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 0.5})
    fields = {"ignore_eos": False, "logit_bias": _no_spaces(tokenizer)}
    return [
        (guide, rig.ask(PROMPTS[number % 4], 120, guide=guide, **sampling, **fields))
        for number, (guide, sampling) in enumerate(itertools.product(GUIDES, samplings))
    ]


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlap", "normal"]
)
@pytest.mark.parametrize("pool", ["large", "small", "colocated"])
def test_every_finished_response_follows_its_grammar(noise, pool, overlap):
    """Seen failing with the first token unmasked on the prefill node, and with rows that do not
    wait."""
    loaded, tokenizer = noise
    num_pages = 20 if pool == "small" else 96
    with PairRig(
        loaded,
        prefill=() if pool == "colocated" else [Size()],
        decode=[Size(num_pages=num_pages, max_running_requests=12)],
        overlap_schedule=overlap,
        new_token_ratio=0.1,
        **({"mode": "colocated"} if pool == "colocated" else {}),
    ) as rig:
        asked = _asked(rig, tokenizer)
        free = rig.serve(PROMPTS[1], 20)
        for guide, one in asked:
            assert one.reason.name == "STOP", one.ended
            text = tokenizer.decode(one.tokens, skip_special_tokens=True)
            assert _holds(guide, text), text
        alone = rig.serve(PROMPTS[1], 20)
        assert free.tokens == alone.tokens


def test_a_response_that_continues_on_another_node_follows_its_grammar(noise):
    """Continue the response as the router replays it. Seen failing if the matcher starts again."""
    loaded, _ = noise
    with PairRig(loaded) as rig:
        for guide in (PERSON, ANSWER):
            whole = rig.serve(PROMPTS[2], 120, guide=guide, ignore_eos=False)
            for count in (1, 2, len(whole.tokens) - 1):
                rest = rig.serve(
                    PROMPTS[2],
                    120,
                    generated=whole.tokens[:count],
                    guide=guide,
                    ignore_eos=False,
                    seed=whole.sampling.seed,
                )
                assert whole.tokens[:count] + rest.tokens == whole.tokens


def _thinking(rig, tokenizer):
    """Every grammar again, behind reasoning text that one more token ends. Half of it is ended
    for the request. The response could end at once."""
    close = tokenizer.token_to_id("|")
    fields = {
        "thought": ReasoningTokens(close, open=None),
        "ignore_eos": False,
        "logit_bias": ((close, 3.0), (END, 10.0), *_no_spaces(tokenizer)),
        "temperature": 1.0,
    }
    return close, [
        (
            guide,
            rig.ask(
                PROMPTS[number % 4],
                150,
                guide=guide,
                thinking_budget=8 if number % 2 else -1,
                seed=seed,
                **fields,
            ),
        )
        for number, (guide, seed) in enumerate(itertools.product(GUIDES, (5, 3)))
    ]


@pytest.mark.parametrize("pool", [pytest.param("large", marks=pytest.mark.long), "small"])
def test_a_grammar_begins_after_the_reasoning(noise, pool):
    """Seen failing with an end inside the reasoning, and with a matcher that follows all tokens."""
    loaded, tokenizer = noise
    with PairRig(
        loaded,
        decode=[Size(num_pages=20 if pool == "small" else 96, max_running_requests=12)],
        new_token_ratio=0.1,
    ) as rig:
        close, asked = _thinking(rig, tokenizer)
        rig.run()
        for guide, one in asked:
            assert one.reason.name == "STOP", one.ended
            end = one.tokens.index(close)
            budget = one.sampling.thinking_budget
            assert budget < 0 or end <= budget
            text = tokenizer.decode(one.tokens[end + 1 :], skip_special_tokens=True)
            assert _holds(guide, text), text
        for _, one in asked:
            for count in (1, one.tokens.index(close) + 1):
                fields = msgspec.structs.asdict(one.sampling)
                rest = rig.serve(one.prompt, generated=one.tokens[:count], **fields)
                assert one.tokens[:count] + rest.tokens == one.tokens


def test_text_is_free_until_a_tag_begins(noise):
    """Then the tag's grammar applies. Seen failing with mask bits that are not filled in."""
    loaded, tokenizer = noise
    with PairRig(loaded) as rig:
        asked = [
            rig.ask(
                PROMPTS[number],
                200,
                guide=TAG,
                ignore_eos=False,
                temperature=1.0,
                seed=number,
                logit_bias=((tokenizer.token_to_id("<"), 3.0), (END, -100.0)),
            )
            for number in range(4)
        ]
        rig.run()
        for one in asked:
            text = tokenizer.decode(one.tokens, skip_special_tokens=True)
            assert re.fullmatch(r"[^<]*<a>[a-c]{2}</a>", text, re.DOTALL), text
            assert one.reason.name == "STOP"


def test_channels_are_marked_with_tokens(noise):
    """Special tokens, which have no text. Seen failing if these have no bytes."""
    loaded, tokenizer = noise
    begin, end = "<|endoftext|>", "<|im_start|>"
    spelt = {CHANNEL: begin, MESSAGE: begin, CONSTRAIN: begin, END_MARKER: end, START: end}
    tokens = {marker: tokenizer.token_to_id(token) for marker, token in spelt.items()}
    channels = Channels(tokens)
    call = channels.calls([("f", SCHEMA)], parallel=False)
    bias = ((tokens[END_MARKER], 10.0), *_no_spaces(tokenizer))
    with PairRig(loaded) as rig:
        asked = [
            rig.ask(
                PROMPTS[number],
                400,
                guide=tag(call if number % 2 else channels.final(as_form(DATE))),
                ignore_eos=False,
                temperature=1.0,
                seed=number,
                logit_bias=bias,
            )
            for number in range(4)
        ]
        rig.run()
    begin, end = re.escape(begin), re.escape(end)
    thought = rf"(?:{begin}analysis{begin}[\s\S]*{end}{end}assistant)?"
    final = rf"{thought}{begin}final{begin}({DATE.text})"
    header = rf"(?:{begin}commentary to=functions\.f | to=functions\.f{begin}commentary )"
    called = rf"{thought}{header}{begin}json{begin}(.*)"
    for number, one in enumerate(asked):
        assert one.reason.name == "STOP", one.ended
        assert one.tokens[-1] == END
        text = tokenizer.decode(one.tokens[:-1], skip_special_tokens=False)
        found = re.fullmatch(called if number % 2 else final, text)
        assert found and _holds(PERSON if number % 2 else DATE, found[1]), text


def test_a_response_may_skip_optional_reasoning(noise):
    """Its first token follows the grammar, or begins the reasoning."""
    loaded, tokenizer = noise
    opens, close = tokenizer.token_to_id("~"), tokenizer.token_to_id("|")
    fields = {"guide": DATE, "thought": ReasoningTokens(close, opens), "ignore_eos": False}
    with PairRig(loaded) as rig:
        plain = rig.ask(PROMPTS[1], 20, **fields)
        bias = ((opens, 100.0), (close, 5.0))
        thinking = rig.serve(PROMPTS[1], 40, logit_bias=bias, thinking_budget=4, **fields)
        assert _holds(DATE, tokenizer.decode(plain.tokens, skip_special_tokens=True))
        assert thinking.tokens[0] == opens and close in thinking.tokens[:6]


@pytest.mark.parametrize(
    "guide, where",
    [
        (GuidedDecoding("json_schema", '{"type": "nonsense"}'), "#: type 'nonsense'"),
        (GuidedDecoding("json_schema", "{no json"), "byte 1"),
        (GuidedDecoding("regex", "a(b"), "position"),
        (GuidedDecoding("ebnf", 'root ::= "a" | b'), "line 1, column 16"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_an_invalid_grammar_is_rejected_with_its_place_and_affects_no_other_request(
    noise, guide, where
):
    loaded, _ = noise
    with PairRig(loaded) as rig:
        refused = rig.ask(PROMPTS[0], 8, guide=guide)
        fine = rig.serve(PROMPTS[0], 4)
        assert refused.ended.error_code == StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.ended.error.startswith(f"sampling.{guide.kind}: ")
        assert where in refused.ended.error
        assert len(fine.tokens) == 4


def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(noise):
    loaded, _ = noise
    with PairRig(loaded) as rig:
        asked = rig.ask(PROMPTS[0], 8, guide=JSON_OBJECT)
        rig.cancel(asked)
        rig.run()
        assert asked.reason.name == "ABORT"


SLOW = GuidedDecoding("regex", "[a-h]{30}z")


def gated(monkeypatch, method, closes):
    """Block the first matcher for which `closes` is true, on its thread before this method, until
    `gate` is set. Return two events: `stands`, which is set then, and `gate`."""
    stands, gate = threading.Event(), threading.Event()
    real = getattr(Match, method)

    def blocked(self):
        if not stands.is_set() and closes(self):
            # Not earlier: on a busy machine an earlier matcher would count as slow.
            monkeypatch.setattr(matching, "_STARVED_S", 0.01)
            stands.set()
            assert gate.wait(60)
        real(self)

    monkeypatch.setattr(Match, method, blocked)
    return stands, gate


def _gated_at(monkeypatch, token):
    return gated(monkeypatch, "_follow", lambda match: match.num_followed == token)


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlap", "normal"]
)
@pytest.mark.parametrize(("colocated", "at"), [(False, 5), (True, 5), (True, 1)])
def test_a_slow_matcher_delays_only_its_own_row(noise, monkeypatch, overlap, colocated, at):
    """The other rows, with a grammar and without, complete while it is blocked."""
    loaded, tokenizer = noise
    fields = {"guide": SLOW, "ignore_eos": False, "temperature": 1.0, "seed": 4}
    where = {"prefill": (), "mode": "colocated"} if colocated else {}
    with PairRig(loaded, overlap_schedule=overlap, **where) as rig:
        alone = [rig.ask(PROMPTS[1], 60, **fields), rig.ask(PROMPTS[2], 40)]
        rig.run()
        stands, gate = _gated_at(monkeypatch, at)
        slow = rig.ask(PROMPTS[1], 60, **fields)
        rig.until(stands.is_set, "a matcher stands still")
        try:
            free = rig.ask(PROMPTS[2], 40)
            date = rig.ask(PROMPTS[0], 20, guide=DATE, ignore_eos=False)
            rig.run(free, date)
            assert not slow.ended and len(slow.tokens) == at
            assert not rig.decode[0].role.scheduler.awaits_steps
        finally:
            gate.set()
        rig.run()
        assert slow.tokens == alone[0].tokens and free.tokens == alone[1].tokens
        assert _holds(DATE, tokenizer.decode(date.tokens, skip_special_tokens=True))
        again = rig.serve(PROMPTS[1], 60, **fields)
        assert again.tokens == slow.tokens


def test_a_row_that_waits_for_its_mask_can_be_cancelled(noise, monkeypatch):
    loaded, _ = noise
    with PairRig(loaded) as rig:
        stands, gate = _gated_at(monkeypatch, 5)
        slow = rig.ask(PROMPTS[1], 60, guide=SLOW, ignore_eos=False)
        rig.until(stands.is_set, "a matcher stands still")
        try:
            rig.cancel(slow)
            rig.run(slow)
            assert slow.reason.name == "ABORT"
        finally:
            gate.set()
        rig.run()


def test_a_response_over_its_grammar_budget_ends_and_no_other(noise, monkeypatch):
    """Really slow: it has ever more readings. It is ended while the verifier accepts everything."""
    monkeypatch.setattr(matching, "ALLOWANCE_S", 0.05)
    monkeypatch.setattr(matching, "S_PER_TOKEN", 1e-5)
    loaded, _ = noise
    with PairRig(loaded) as rig:
        fields = {
            "guide": GuidedDecoding("ebnf", "root ::= s\ns ::= s s | [a-z ]"),
            "min_tokens": 190,
        }
        slow = rig.ask(PROMPTS[1], 200, **fields)
        free = rig.serve(PROMPTS[2], 60)
        assert slow.ended.error_code == StatusCode.INVALID_ARGUMENT.value[0]
        assert slow.ended.error.startswith("sampling.guide: its grammar has used")
        assert 1 < len(slow.tokens) < 200
        assert len(free.tokens) == 60


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 50}])
def test_a_response_ends_where_its_grammar_ends(noise, fields):
    """The response ends with its grammar, whatever its stop conditions are.

    Seen failing with free text behind the first response, and with tokens that the grammar forbids
    behind the second.
    """
    loaded, tokenizer = noise
    with PairRig(loaded) as rig:
        one = rig.serve(PROMPTS[1], 60, guide=GuidedDecoding("ebnf", 'root ::= "zebra"'), **fields)
        assert one.reason.name == "STOP"
        assert tokenizer.decode(one.tokens, skip_special_tokens=True) == "zebra"
