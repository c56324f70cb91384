"""Adds the generated pages to the site, takes links to the code out of it, and gives pages with
diagrams what draws them: the site loads nothing from anywhere else.

MkDocs calls it; see mkdocs.yml.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from docs.generate import configuration, grpc_api, http_api

_PAGES = {
    "reference/configuration.md": configuration.page,
    "reference/grpc.md": grpc_api.page,
    "reference/http.md": http_api.page,
}
_ICON = Path(__file__).parents[2] / "router" / "api" / "page" / "icon.svg"
# The theme would load it from a public host, unless it finds it in the page.
_DRAWS = "assets/mermaid-11.17.2.min.js"
# A file or folder of the repository that is no page: there to be followed where the code is.
_LINK_TO_CODE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


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
