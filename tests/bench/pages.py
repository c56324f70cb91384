"""Reads a report like a strict browser, and rejects content that a report must not have."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attributes):
        assert tag not in {"script", "link", "iframe", "img", "object", "base"}, tag
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attributes}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert not re.search(r"@import|url\(", data)
        elif data.strip():
            self.texts.append(data.strip())
            if self.open[-1] == "td":
                self.cells.append(data.strip())


class Page:
    """Check a report: every tag closed, every plot well-formed, no external content."""

    def __init__(self, file: Path) -> None:
        source = file.read_text()
        assert source.startswith("<!doctype html>")
        assert 'name="viewport"' in source
        assert "prefers-color-scheme: dark" in source
        reader = _Reader()
        reader.feed(source)
        reader.close()
        assert reader.open == [], "not every tag is closed"
        self.cells = reader.cells
        self.text = " ".join(reader.texts)
        self.plots = [
            ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", source, re.DOTALL)
        ]

    def num_points(self) -> int:
        return sum(len(plot.findall("circle")) for plot in self.plots)
