"""The site of `make docs`, without building it."""

import re
from types import SimpleNamespace

import pytest
import yaml

from cli.main import commands as cli_commands
from common.config import DecodeConfig, PrefillConfig, RouterConfig
from docs.generate import commands, configuration, hooks
from tests.support.processes.programs import ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("url, up", [("index.html", ""), ("reference/http.html", "../")])
def test_the_diagram_script_is_part_of_the_site_and_on_pages_with_diagrams(url, up):
    # Seen failing: the theme fetched it from a public host.
    page = SimpleNamespace(url=url)
    drawn = hooks.on_page_content('<pre class="mermaid"><code>graph</code></pre>', page=page)
    source = drawn.partition('<script src="')[2].partition('"')[0]
    assert source.startswith(f"{up}assets/mermaid") and (DOCS / source.removeprefix(up)).is_file()
    assert "<script" not in hooks.on_page_content("<p>graph</p>", page=page)


@pytest.mark.parametrize(
    "path, link, shown",
    [
        ("gpu.md", "[tests](../tests/engine/runner/test_launches.py)", "tests"),
        ("gpu.md", "[moves](moves.md)", "[moves](moves.md)"),
        ("design/moves.md", "[moves](../moves.md)", "[moves](../moves.md)"),
        ("design/moves.md", "[tests](../../tests/pair)", "tests"),
    ],
)
def test_only_links_to_files_outside_of_docs_become_text(path, link, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=path))
    assert hooks.on_page_markdown(f"See {link}.", page=page) == f"See {shown}."


def test_the_site_names_only_existing_style_files():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    assert settings["theme"]["font"] == "false"  # the theme's own come from a public host
    for style in settings["extra_css"]:
        assert (DOCS / style).is_file()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_no_line_of_a_paragraph_starts_like_a_list_item(page):
    # Markdown makes a list item of a line that starts with a number and a point.
    numbers = [0]
    for number in re.findall(r"^ {0,3}(\d+)\. ", page.read_text(), re.MULTILINE):
        assert int(number) in (1, numbers[-1] + 1), f"a line begins with `{number}. `"
        numbers.append(int(number))


def test_a_setting_has_its_anchor_names_choices_default_and_description():
    row = next(line for line in configuration.page().splitlines() if 'id="decode-mode"' in line)
    assert "`--mode`<br>`BATON_MODE`" in row
    assert (
        "| `disaggregated`, `colocated` | `disaggregated` | Mode. colocated: the decode node" in row
    )


def test_large_bounds_of_settings_are_exact():
    # Seen failing: "at most 8.38861e+06".
    page = configuration.page()
    assert "at most 8388608" in page and "e+0" not in page


def test_every_setting_of_every_component_is_in_the_configuration_reference():
    anchors = re.findall(r'<a id="([a-z0-9-]+)">', configuration.page())
    assert len(anchors) == len(set(anchors)) > 200
    records = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
    for component, record in records.items():
        for name in record.model_fields:
            own = f"{component}-{name.replace('_', '-')}"
            assert any(anchor == own or anchor.startswith(f"{own}-") for anchor in anchors)


def test_the_cli_reference_has_every_command_with_its_options():
    parts = dict(
        re.findall(r"^###? baton ([^\n]+)\n(.*?)(?=^###? |\Z)", commands.page(), re.M | re.S)
    )
    names = [name for name, _ in cli_commands()]
    assert [name for name in parts if name in names] == names
    parts["bench"] = parts["bench load"]  # only its subcommands have options
    assert all("| `" in parts[name] or "configuration.md" in parts[name] for name in names)
    assert "| `--exit-on-failure` |" in parts["up"]


def test_pages_of_benchmarks_and_designs_are_in_the_navigation():
    config = SimpleNamespace(nav=[], docs_dir=str(DOCS))
    hooks.on_config(config)
    found = [page for section in config.nav for pages in section.values() for page in pages]
    assert sorted(found) == sorted(
        str(page.relative_to(DOCS))
        for folder in ("benchmarks", "design")
        for page in (DOCS / folder).glob("*.md")
    )
    assert found[0] == "benchmarks/index.md"


def test_a_warning_of_the_site_generator_fails_make_docs():
    # Seen passing over broken links: `--quiet` hides warnings, and then `strict` counts none.
    assert "mkdocs build --quiet" not in (ROOT / "Makefile").read_text()
