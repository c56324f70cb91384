"""Fold comments and docstrings that a longer name has made too long for a line."""

import io
import re
import tokenize

WIDTH = 100
_ITEM = re.compile(r"\s*(?:#\s*)?(?:[\w.*]+(?: \([^)]*\))?:|[-*] |\d+[.)] |>>> |\|)")

_PRAGMA = re.compile(r"# (?:type:|noqa|pragma)")  # it stays on its line


def fold(source: str) -> str:
    """Return the source of a Python file without long lines in comments and docstrings."""
    while (after := _fold_first(source)) != source:
        source = after
    return source


def _fold_first(source: str) -> str:
    lines = source.split("\n")
    if all(len(line) <= WIDTH for line in lines):
        return source
    comments, strings = _text_lines(source)
    for index, line in enumerate(lines):
        if len(line) <= WIDTH:
            continue
        if index in comments and line.lstrip()[0] != "#":
            column = comments[index]
            indent = line[: len(line) - len(line.lstrip())]
            lines[index : index + 1] = [indent + line[column:], line[:column].rstrip()]
            return "\n".join(lines)
        if index in comments or index in strings:
            cut = line.rfind(" ", 0, WIDTH + 1)
            start = re.match(r"\s*(?:#\s*)?(?:\"\"\")?", line)
            assert start is not None
            if cut <= start.end():
                continue
            indent = start[0].replace('"""', "")
            after = lines[index + 1] if index + 1 < len(lines) else ""
            joins = (
                after.startswith(indent)
                and after[len(indent) :].strip('" ') != ""
                and not after[len(indent)].isspace()
                and not _ITEM.match(after)
                and (index + 1 in strings if index in strings else index + 1 in comments)
            )
            rest = line[cut + 1 :]
            lines[index] = line[:cut]
            if joins:
                lines[index + 1] = f"{indent}{rest} {after[len(indent) :]}"
            else:
                deeper = "    " if _ITEM.match(line) and index in strings else ""
                lines.insert(index + 1, f"{indent}{deeper}{rest}")
            return "\n".join(lines)
    return source


def _text_lines(source: str) -> tuple[dict[int, int], set[int]]:
    """Return the column of the comment of each line that has one, and the lines of docstrings."""
    comments: dict[int, int] = {}
    strings: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _PRAGMA.match(token.string):
            comments[token.start[0] - 1] = token.start[1]
        elif token.string.startswith('"""') and token.line.lstrip().startswith('"""'):
            strings.update(range(token.start[0] - 1, token.end[0]))
    return comments, strings
