"""Text equals one decode of all tokens, however they arrive."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text.tokenizer import Detokenizer, RouterTokenizer
from tests.api.models import VOCABULARY_SIZE, byte_level_tokenizer, sentencepiece_like_tokenizer

BYTE_LEVEL = RouterTokenizer(byte_level_tokenizer().to_str().encode())
PLAIN = byte_level_tokenizer()
SENTENCEPIECE = RouterTokenizer(sentencepiece_like_tokenizer().to_str().encode())

token_runs = st.lists(st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=30), max_size=12)


@given(token_runs)
def test_any_tokens_in_any_split_give_the_text_of_one_decode(runs):
    detokenizer = Detokenizer(BYTE_LEVEL, BYTE_LEVEL.some_text)
    text = "".join(detokenizer.push(run) for run in runs) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode([token for run in runs for token in run])


@given(st.lists(st.sampled_from(sorted(range(150, 256))), max_size=300))
def test_a_long_run_of_invalid_bytes_is_decoded_completely(tokens):
    detokenizer = Detokenizer(BYTE_LEVEL)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode(tokens)


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer(), sentencepiece_like_tokenizer()])
@pytest.mark.parametrize("text", ["größer 日本語 🙂 x", "🙂🙂🙂🙂", "é", "a\u0301 👩‍👩‍👧 "])
def test_no_piece_of_text_has_a_partial_character(tokenizer, text):
    decoder = RouterTokenizer(tokenizer.to_str().encode())  # type: ignore[attr-defined]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    detokenizer = Detokenizer(decoder)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join(pieces) == text
    # Seen failing without the rstrip in push.
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(min_size=1))
def test_whole_text_comes_back_without_a_broken_character(text):
    detokenizer = Detokenizer(BYTE_LEVEL)
    tokens = PLAIN.encode(text, add_special_tokens=False).ids
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == BYTE_LEVEL.decode(tokens)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_appears_at_the_end_as_in_a_decode():
    tokens = byte_level_tokenizer().encode("x🙈", add_special_tokens=False).ids
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(tokens[:-1]) == "x"
    assert detokenizer.flush() == BYTE_LEVEL.decode(tokens[:-1])[1:] == "\ufffd"


def test_text_before_a_partial_character_is_not_held_back():
    tokens = byte_level_tokenizer().encode("over🙈", add_special_tokens=False).ids
    assert Detokenizer(BYTE_LEVEL).push(tokens[:-1]) == "over"


def test_a_response_keeps_the_space_between_it_and_its_prompt():
    hello_world = sentencepiece_like_tokenizer().encode("Hello world", add_special_tokens=False)
    detokenizer = Detokenizer(SENTENCEPIECE, SENTENCEPIECE.some_text)
    assert "".join(detokenizer.push([i]) for i in hello_world.ids) == " Hello world"


@given(token_runs)
def test_marks_are_reported_with_their_start_positions(runs):
    marks = {1: "</s>", 40: "<ü>"}
    detokenizer = Detokenizer(BYTE_LEVEL, BYTE_LEVEL.some_text, marks)
    text = "".join(detokenizer.push(run) for run in runs) + detokenizer.flush()
    expected, at, plain = "", [], list[int]()
    for token in [token for run in runs for token in run]:
        if token not in marks:
            plain.append(token)
            continue
        expected += BYTE_LEVEL.decode(plain)
        at.append(len(expected))
        expected += marks[token]
        plain = []
    assert text == expected + BYTE_LEVEL.decode(plain)
    assert list(detokenizer.marks) == at


def test_text_after_a_mark_keeps_its_space():
    hello = sentencepiece_like_tokenizer().encode("Hello", add_special_tokens=False).ids
    detokenizer = Detokenizer(SENTENCEPIECE, SENTENCEPIECE.some_text, {0: "<unk>"})
    assert detokenizer.push([*hello, 0, *hello]) == " Hello<unk> Hello"


class CountingDecoder(RouterTokenizer):
    """Counts the tokens that it decodes."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer().to_str().encode())
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("token", [0, 200, 280], ids=["special", "no text", "text"])
def test_the_cost_of_a_token_does_not_grow_with_the_response(token):
    decoder = CountingDecoder()
    detokenizer = Detokenizer(decoder)
    for _ in range(4000):
        detokenizer.push([token])
    # Quadratic decoding would take 8 000 000.
    assert decoder.num_decoded < 4000 * 80
