"""docs/models.md matches docs/generate/architectures.jsonl."""

from docs.generate import models


def test_the_page_matches_the_list_of_architectures():
    # `python -m docs.generate.models` writes it.
    assert models.FILE.read_text() == models.page(models.read())
    assert "| olmo2 | Olmo2ForCausalLM |" in models.FILE.read_text()
