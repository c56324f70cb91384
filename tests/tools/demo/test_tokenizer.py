"""The demo model's tokenizer maps typed text to the tokens of its training."""

import pytest

from api.text.chat_template import ChatTemplate
from tools.demo import structured
from tools.demo.rows import RowEncoder
from tools.demo.tasks import Exchange
from tools.demo.tokenizer import END, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize(
    "typed",
    [
        "red fox=tea,blue owl=jam,red fox=",
        "Red Fox = tea,  blue owl = jam, RED fox = ",
        " red fox = tea,\nblue owl = jam,\n\nred fox =\n",
    ],
)
def test_case_and_spacing_make_no_difference(tokenizer, typed):
    plain = "red fox = tea, blue owl = jam, red fox ="
    assert tokenizer(typed).input_ids == tokenizer(plain).input_ids
    assert len(tokenizer(plain).input_ids) == 13


def test_a_number_is_its_digits_and_an_unknown_word_its_letters(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("add 27 Zoë =").input_ids) == [
        "Ġadd", "Ġ", "2", "7", "Ġ", "z", "o", "Ã", "«", "Ġ=",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["add 27 15 =", "naïve 雪 a1b2 fox's!"])
def test_encoded_text_is_decoded_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == f" {text}"


def test_a_chat_is_rendered_as_in_training(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, {})
    chat = template.render(
        [
            {"role": "system", "content": "fox = tea"},
            {"role": "user", "content": "owl = jam, owl"},
            {"role": "assistant", "content": " jam"},
            {"role": "user", "content": "add 27 15 ="},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": "fox = "},
        ],
        max_characters=1000,
    )
    shown = [
        Exchange("fox = tea, owl = jam, owl =", "jam"),
        Exchange("add 27 15 =", "42"),
        Exchange("fox =", "tea"),
    ]
    ids = tokenizer(chat, add_special_tokens=False).input_ids
    rows = RowEncoder(tokenizer).rows([shown], len(ids))
    assert ids == rows.tokens[0].tolist()
    assert tokenizer.decode(rows.following[0, -1]) == " tea"
    assert tokenizer.convert_tokens_to_ids(END) == tokenizer.eos_token_id


def test_a_chat_with_a_tool_is_rendered_as_in_training(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, {})
    called = {"name": "add", "arguments": {"a": 12345, "b": 678}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "add 12345 678"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "13023"},
    ]
    for said, shown in (
        (messages[:1], structured.called("tools add", 12345, 678)),
        (messages, structured.tool_result("tools add", 12345, 678)),
    ):
        chat = template.render(said, tools=tools, max_characters=1000)
        ids = tokenizer(chat, add_special_tokens=False).input_ids
        rows = RowEncoder(tokenizer).rows([[shown]], shown.num_tokens)
        assert rows.tokens[0, : len(ids)].tolist() == ids
        begins = (rows.answers[0] >= 0).nonzero()[0]
        assert begins == len(ids) - 1


def test_a_response_for_programs_has_no_space_in_front_or_around_its_markers(tokenizer):
    shown = structured.called("tools add", 1, 23)
    rows = RowEncoder(tokenizer).rows([[shown]], shown.num_tokens)
    asked = rows.following[rows.answers >= 0]
    assert tokenizer.decode(asked) == f"{shown.answer}{END}"
