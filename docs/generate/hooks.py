"""Adds generated pages and the folders of benchmarks and designs to the site, removes links to the
code, and adds the script that draws diagrams. The site loads nothing from other hosts.

MkDocs calls these functions. See mkdocs.yml.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from docs.generate import commands, configuration, grpc_api, http_api

# Folders whose pages are in the navigation without being named in mkdocs.yml.
_FOLDERS = {"Benchmarks": "benchmarks", "Design": "design"}
_PAGES = {
    "reference/cli.md": commands.page,
    "reference/configuration.md": configuration.page,
    "reference/grpc.md": grpc_api.page,
    "reference/http.md": http_api.page,
}
_ICON = Path(__file__).parents[2] / "api" / "page" / "icon.svg"
# The theme would load it from a public host, unless it finds it in the page.
_DRAWS = "assets/mermaid-11.17.2.min.js"
# A link that leaves docs/ works where the code is, and becomes plain text on the site.
_UPWARD_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in _PAGES.items():
        files.append(File.generated(config, path, content=page()))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(_ICON)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    depth = page.file.src_uri.count("/")
    return _UPWARD_LINK.sub(
        lambda link: link[1] if link[2].count("../") > depth else link[0], markdown
    )


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    if 'class="mermaid"' not in html:
        return html
    return f'<script src="{get_relative_url(_DRAWS, page.url)}"></script>\n{html}'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    docs = Path(config.docs_dir)
    for title, folder in _FOLDERS.items():
        pages = sorted((docs / folder).glob("*.md"), key=lambda page: (page.stem != "index", page))
        config.nav.append({title: [str(page.relative_to(docs)) for page in pages]})
    return config
