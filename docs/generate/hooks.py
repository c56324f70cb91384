"""Adds the generated pages to the site, and takes links to the code out of it.

MkDocs calls it; see mkdocs.yml.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.generate import configuration, grpc_api, http_api

_PAGES = {
    "reference/configuration.md": configuration.page,
    "reference/grpc.md": grpc_api.page,
    "reference/http.md": http_api.page,
}
# A file or folder of the repository that is no page: there to be followed where the code is.
_LINK_TO_CODE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in _PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return _LINK_TO_CODE.sub(r"\1", markdown)
