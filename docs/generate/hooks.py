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

_PAGES = {
    "reference/cli.md": commands.page,
    "reference/configuration.md": configuration.page,
    "reference/grpc.md": grpc_api.page,
    "reference/http.md": http_api.page,
}
_ICON = Path(__file__).parents[2] / "router" / "api" / "page" / "icon.svg"
# Folders whose pages are in the navigation without being named in mkdocs.yml.
_FOLDERS = {"Benchmarks": "benchmarks", "Design": "design"}
# The theme would load it from a public host, unless it finds it in the page.
_DRAWS = "assets/mermaid-11.17.2.min.js"
# A file or folder of the repository that is not a page. The link works where the code is.
_LINK_TO_CODE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    assert config.nav is not None
    docs = Path(config.docs_dir)
    for title, folder in _FOLDERS.items():
        pages = sorted((docs / folder).glob("*.md"), key=lambda page: (page.stem != "index", page))
        config.nav.append({title: [str(page.relative_to(docs)) for page in pages]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in _PAGES.items():
        files.append(File.generated(config, path, content=page()))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(_ICON)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return _LINK_TO_CODE.sub(r"\1", markdown)


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    if 'class="mermaid"' not in html:
        return html
    return f'<script src="{get_relative_url(_DRAWS, page.url)}"></script>\n{html}'
