"""Templates see what templates in the wild expect, and cannot do more than make text."""

import pytest

from api.text.chat_template import ChatTemplate
from common.errors import ConfigError, InvalidRequest

USER = [{"role": "user", "content": "<hi> & ü"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        USER, max_characters=1000
    )


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s><hi> & ü</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<hi> & ü"}]'),
        ("{% if tools %}x{% endif %}{{ add_generation_prompt }}", "True"),
        ("{% for m in messages %}{% break %}{% endfor %}done", "done"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_a_template_renders(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.nothing }}",
        "{{ 1 + messages[0].role }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_raises_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="messages: refused"):
        render(source)


def test_what_is_no_template_is_a_wrong_configuration() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        render("{% for %}")
