"""A response's text, ids and usage, for tokens and ends in any grouping."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from api.requests.answer import FinalChunk, ResponseBuilder
from api.requests.generate_params import TokenizedRequest
from api.text.stops import StopRules
from api.text.tokenizer import Detokenizer
from router.token_buffer import NodeOutput, StreamEnd
from tests.api.models import VOCABULARY_SIZE, ids
from tests.api.text.test_detokenizer import BYTE_LEVEL
from tests.api.text.test_stops import cut
from tests.support.specs import make_spec

LENGTH = StreamEnd("length")


def answer(*stops: str, marks: dict[int, str] | None = None, **sampling: Any) -> ResponseBuilder:
    detokenizer = Detokenizer(BYTE_LEVEL, BYTE_LEVEL.some_text, marks or {})
    spec = make_spec([5] * 5)
    job = TokenizedRequest(
        spec, StopRules(stops) if stops else None, replace(spec.sampling, **sampling)
    )
    return ResponseBuilder(job, detokenizer, BYTE_LEVEL.spelling)


@given(
    st.lists(st.lists(st.integers(2, VOCABULARY_SIZE - 1), min_size=1, max_size=9), max_size=8),
    st.lists(st.sampled_from(["e", "the", "STOP", "qu", " ", "ü"]), max_size=3),
)
def test_the_text_is_one_decode_cut_at_the_first_stop(runs, stops):
    subject, text = answer(*stops), ""
    token_ids: list[int] = []
    for run in [*runs, []]:
        last = subject.add(NodeOutput(run, None if run else LENGTH))
        text += last.text
        token_ids += last.token_ids
        if isinstance(last, FinalChunk):
            break
    everything = [token for run in runs for token in run]
    expected, stopped = cut(BYTE_LEVEL.decode(everything), stops)
    assert isinstance(last, FinalChunk)
    assert (text, last.finish_reason) == (expected, "stop" if stopped else "length")
    assert token_ids == everything[: len(token_ids)]
    assert last.usage.completion_tokens == len(token_ids)


@given(st.lists(st.integers(1, 4), max_size=12), st.booleans())
def test_marks_have_their_positions_in_the_text_of_their_piece(sizes, ended):
    """A stop that starts like a mark holds it back until another piece arrives."""
    subject = answer("s>S", "STOP", marks={0: "<s>"})
    texts = ["", "o <", "s> ", "", "", "x STO", "", " S", *["TOP"] * ended, ""]
    token_ids = [token for text in texts for token in (ids(text) if text else [0])]
    text, found, begin = "", list[int](), 0
    for size in [*sizes, len(token_ids)]:
        end = LENGTH if begin + size >= len(token_ids) else None
        piece = subject.add(NodeOutput(token_ids[begin : begin + size], end))
        found += [len(text) + mark for mark in piece.marks]
        text += piece.text
        begin += size
        if isinstance(piece, FinalChunk):
            break
    whole = "<s>o <s> <s><s>x STO<s> "
    assert text == (whole if ended else f"{whole}S<s>")
    assert found == [0, 9, 12, 20, *([] if ended else [25])]


def test_usage_counts_up_to_the_token_that_completes_the_stop():
    before, stop, after = ids("the fox"), ids(" STOP"), ids(" jumps")
    piece = answer(" STOP").add(NodeOutput(before + stop + after))
    assert isinstance(piece, FinalChunk)
    assert piece.text == "the fox"
    assert piece.token_ids == before + stop
    assert piece.usage.completion_tokens == len(before + stop)
    assert piece.usage.prompt_tokens == 5


def test_the_end_releases_text_that_was_held_back():
    subject = answer("STOP")
    assert subject.add(NodeOutput(ids("one ST"))).text == "one "
    last = subject.add(NodeOutput([], LENGTH, 3))
    assert isinstance(last, FinalChunk)
    assert (last.text, last.finish_reason, last.usage.cached_tokens) == ("ST", "length", 3)


def test_the_finish_reason_is_reported():
    """EOS and a length limit have no stop string."""
    stop = StreamEnd("stop")

    def reason(text: str, end: StreamEnd, **options: Any) -> str | int | None:
        last = answer("STOP", "x", **options).add(NodeOutput(ids(text), end))
        assert isinstance(last, FinalChunk)
        return last.stop_reason

    token = ids("the")[-1]
    assert reason("the STOP", stop) == "STOP"
    assert reason("the", LENGTH) is None
    assert reason("the", stop) is None
    assert reason("the", stop, stop_token_ids=(token,)) == token
    assert reason("the", LENGTH, stop_token_ids=(token,)) is None


def test_a_stop_string_does_not_end_a_response_below_its_minimum_length():
    """Seen failing if the stops check every token."""
    subject = answer("a", min_tokens=3)
    tokens = [ids("a")[0]] * 5
    first, last = subject.add(NodeOutput(tokens[:2])), subject.add(NodeOutput(tokens[2:]))
    assert (first.text, last.text) == ("aa", "a")
    assert isinstance(last, FinalChunk) and last.usage.completion_tokens == 4
