"""docs/models.md matches docs/generate/architectures.jsonl."""

from docs.generate import models


def test_the_page_is_what_was_found():
    # `python -m docs.generate.models` writes it anew.
    assert models.FILE.read_text() == models.page(models.read())
    assert "| olmo2 | Olmo2ForCausalLM |" in models.FILE.read_text()
