"""Conversations as chat templates see them: the same as with Hugging Face's tokenizers. Errors name
the fields that a template does not support."""

from typing import Any

import pytest

from api.images.picture import ImageInput
from api.requests.generate_params import (
    MAX_SETTINGS_BYTES,
    ChatPrompt,
    ChatTurn,
    PastToolCall,
    PromptEnding,
)
from api.requests.prompts import check_conversation, render_conversation
from api.text.chat_template import MAX_VALUES, ChatTemplate
from common.errors import ConfigError, InvalidRequest

MAX = 10_000
USER = ChatTurn("user", "hi")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OPENING = PLAIN + "{% if add_generation_prompt %}[assistant]{% endif %}"


def prompt(source: str, *turns: ChatTurn, **fields: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = ChatPrompt(turns or (USER,), **fields)
    check_conversation(messages, template, MAX)
    return render_conversation(messages, template, MAX)


def called(arguments: str = '{"a": 1}') -> ChatTurn:
    return ChatTurn("assistant", None, tool_calls=(PastToolCall("f", arguments, "call-1"),))


def test_a_template_that_ignores_tools_gets_none():
    with pytest.raises(InvalidRequest, match=r"^tools: this model's chat template does not"):
        prompt(PLAIN, tools=[TOOL])
    with pytest.raises(InvalidRequest, match=r"^messages\[1\].tool_calls: this model's chat"):
        prompt(PLAIN, USER, called())


@pytest.mark.parametrize(
    "printed, expected",
    [
        ("{{ a | tojson }}", '{"a": 1}'),
        ("{{ a if a is string else a | tojson }}", '{"a": 1}'),
        ("{{ 'x' + a + 'y' }}", 'x{"a":1}y'),
        ("{{ 'x' ~ a }}", 'x{"a":1}'),
        ("{{ a }}", '{"a":1}'),
        ("{% for key, value in a.items() %}{{ key }}={{ value }}{% endfor %}", "a=1"),
    ],
)
def test_arguments_of_a_call_have_the_format_that_the_template_needs(printed, expected):
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + printed
    assert prompt(source, called('{"a":1}')) == expected


@pytest.mark.parametrize(
    "arguments",
    ["{", '{"a": 1', "[1]", "no JSON", "[" * 4000 + "]" * 4000, "{" + "[]," * MAX_VALUES],
    ids=["half", "cut off", "a list", "text", "deep", "many values"],
)
def test_arguments_that_are_no_object_reach_the_template_as_written(arguments):
    """Seen failing: 400, so an agent whose model wrote an invalid call could not continue."""
    given = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    template = ChatTemplate(
        given
        + "{{ a | tojson }}|{{ a }}|{{ '' + a }}|{% for k, v in a|items %}{{ v }}{% endfor %}",
        {},
    )
    reported = render_conversation(ChatPrompt([called(arguments)]), template, 10 * len(arguments))
    assert reported.split("|") == [arguments] * 4


def test_a_call_without_arguments_has_none():
    source = "{{ messages[0].tool_calls[0].function.arguments | length }}"
    assert prompt(source, called("")) == "0"


def test_content_may_be_missing_only_in_a_message_with_calls():
    assert prompt("{{ messages[0].content is none }}{{ tool_calls }}", called()) == "True"
    assert prompt("{{ 'x' + messages[0].content }}", ChatTurn("assistant", None)) == "x"


def test_a_template_that_uses_names_of_speakers_gets_them():
    source = "{% for m in messages %}{{ m.role }} {{ m.name or 'unnamed' }};{% endfor %}"
    assert prompt(source, ChatTurn("user", "hi", "ada"), USER) == "user ada;user unnamed;"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_templates_own_field_name(name):
    assert (
        prompt(f"{{{{ messages[0].{name} }}}}", ChatTurn("assistant", "x", reasoning="hm")) == "hm"
    )


def test_template_arguments_are_passed_on_and_unknown_ones_rejected_with_a_suggestion():
    source = "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
    assert prompt(source, settings={"enable_thinking": False}) == "no"
    expected = r"^chat_template_kwargs: .* no variable 'enable_thinkin' \(did you mean enable_think"
    with pytest.raises(InvalidRequest, match=expected):
        prompt(source, settings={"enable_thinkin": False})
    assert prompt("{{ reasoning_effort }}", reasoning_effort="high") == "high"
    with pytest.raises(InvalidRequest, match=r"^reasoning_effort: this model's chat template"):
        prompt(source, reasoning_effort="high")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "raise_exception", "add_generation_prompt", "range"]
)
def test_a_template_argument_cannot_replace_another_field(name):
    source = "{{ bos_token }}{{ raise_exception }}{{ add_generation_prompt }}{{ range }}{{ tools }}"
    with pytest.raises(InvalidRequest, match=r"no variable"):
        prompt(PLAIN + source, settings={name: "x"})


def test_template_arguments_and_tools_count_towards_the_limit_before_rendering():
    source = "{{ raise_exception('rendered') }}{{ tools }}{{ x }}"
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs has 16394 bytes"):
        prompt(source, settings={"x": "y" * (MAX_SETTINGS_BYTES + 2)})
    with pytest.raises(InvalidRequest, match=r"messages has .* bytes of text"):
        prompt(source, tools=[{**TOOL, "more": "x" * MAX}])
    with pytest.raises(InvalidRequest, match=r"messages has .* bytes of text"):
        prompt(source + "tool_calls", called('{"a":"%s"}' % ("x" * MAX)))


def test_the_end_of_a_conversation_follows_the_requests_flags():
    turns = USER, ChatTurn("assistant", "ho ")
    assert prompt(OPENING, *turns) == "[user]hi[assistant]ho [assistant]"
    assert prompt(OPENING, *turns, ending=PromptEnding.CLOSED) == "[user]hi[assistant]ho "
    closing = OPENING.replace("{% endfor %}", "</s>{% endfor %}")
    continued = prompt(closing, *turns, ending=PromptEnding.CONTINUED)
    assert continued == "[user]hi</s>[assistant]ho "


@pytest.mark.parametrize(
    "parts, expected",
    [
        ((ImageInput(b"x"), "it shows "), "[user]hi</s>[assistant]<image>it shows "),
        (("see", ImageInput(b"x")), "[user]hi</s>[assistant]see<image>"),
    ],
)
def test_a_last_message_with_an_image_is_continued(parts, expected):
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}"
        "</s>{% endfor %}"
    )
    turns = USER, ChatTurn("assistant", None, parts=parts)
    assert prompt(source, *turns, ending=PromptEnding.CONTINUED) == expected


def test_a_last_message_that_the_template_omits_cannot_be_continued():
    with pytest.raises(InvalidRequest, match=r"^continue_final_message: "):
        prompt(
            "{{ messages[0].content }}",
            USER,
            ChatTurn("assistant", "ho"),
            ending=PromptEnding.CONTINUED,
        )


def test_a_clients_text_is_not_rendered_as_a_template():
    content = "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}"
    assert prompt(PLAIN, ChatTurn("user", content)) == f"[user]{content}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ settings.__class__.__mro__ }}",
        "{{ settings.update({'a': 1}) }}{{ settings.nothing.more }}",
        "{{ messages[0].tool_calls[0].function.arguments.update({}) }}",
        "{{ messages[0].tool_calls[0].function.arguments._text + 1 }}",
        "{% for x in range(1000000) %}x{% endfor %}{{ settings }}",
        "{{ '%s' % settings.nothing.nothing }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.nothing }}",
        "{{ 1 + messages[0].role }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_an_error_of_a_template_rejects_the_request_and_it_can_access_only_its_arguments(source):
    settings: dict[str, Any] = {"settings": {}} if "settings" in source else {}
    with pytest.raises(InvalidRequest, match=r"^messages: refused by the model's chat template"):
        prompt(source + "{# tool_calls #}", called(), settings=settings)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s><hi> & ü"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<hi> & ü"}]'),
        ("{% if tools %}x{% endif %}{{ add_generation_prompt }}", "True"),
        ("{% for m in messages %}{% break %}{% endfor %}done", "done"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_a_template_renders(source, expected):
    assert prompt(source, ChatTurn("user", "<hi> & ü")) == expected


def test_an_invalid_template_is_a_configuration_error():
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% for %}", {})
