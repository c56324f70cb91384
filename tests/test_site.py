"""The site of `make docs`, as far as it can be told without building it."""

import re
from types import SimpleNamespace

import pytest
import yaml

from docs.generate import hooks
from tests.support.programs import ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("url, up", [("index.html", ""), ("reference/http.html", "../")])
def test_what_draws_diagrams_is_part_of_the_site_and_on_pages_that_have_any(url, up):
    # Seen failing: the theme fetched it from a public host.
    page = SimpleNamespace(url=url)
    drawn = hooks.on_page_content('<pre class="mermaid"><code>graph</code></pre>', page=page)
    source = drawn.partition('<script src="')[2].partition('"')[0]
    assert source.startswith(f"{up}assets/mermaid") and (DOCS / source.removeprefix(up)).is_file()
    assert "<script" not in hooks.on_page_content("<p>graph</p>", page=page)


def test_the_site_names_no_file_of_its_look_that_is_not_there():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    assert settings["theme"]["font"] == "false"  # the theme's own come from a public host
    for style in settings["extra_css"]:
        assert (DOCS / style).is_file()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_no_line_of_a_paragraph_begins_like_an_item_of_a_list(page):
    # Markdown makes an item of a line that begins with a number and a point.
    numbers = [0]
    for number in re.findall(r"^ {0,3}(\d+)\. ", page.read_text(), re.MULTILINE):
        assert int(number) in (1, numbers[-1] + 1), f"a line begins with `{number}. `"
        numbers.append(int(number))
