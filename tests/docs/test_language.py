"""The documentation follows the language rules: the number of violations on each page may only
fall.

`python -m tests.docs.test_language PAGE...` lists the violations. With `--record` it writes the
numbers of all pages into language.json.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "*/README.md") for page in ROOT.glob(pattern)
)
COUNTS = ROOT / "tests" / "docs" / "language.json"
LONGEST = 35  # words of a sentence
WORDS = re.compile(
    r"\b(told|tells?|let in|goes? on|going on|went on|anew|besides|heed(?:s|ed)?|mend(?:s|ed)?"
    r"|dawdles?|as ever|is none|whosesoever|whoever|somebody|nobody|anybody|he|his|him"
    r"|beats?|knobs?|programs?|strangers?|misfits?|is over|are over)\b",
    re.IGNORECASE,
)
# Parts of identifiers and words of comments. The lookaheads spare names of a setting and of Triton.
IDENTIFIERS = re.compile(
    r"(?<![A-Za-z])(?i:told|tells?|telling|untold|(?:un)?heed(?:s|ed)?|mend(?:s|ed)?|dawdles?"
    r"|strangers?|misfits?|suspects?(?![_-]after)|guilty|innocent|lend(?:s|ers?|ing)?|let_in|let_go"
    r"|go(?:es)?_on|turn(?:ed)?_(?:out|away)|knob|beats?|anew|nobody|somebody|anybody|whoever"
    r"|(?:de)?tokenis\w*)(?![a-z])"
)
CODE = sorted(
    path
    for path in ROOT.glob("[a-z]*/**/*")
    if path.suffix in (".py", ".js", ".proto")
    and path.relative_to(ROOT).parts[0] not in ("tests", "build", "var")
    and "_pb2" not in path.name
    and path.name != "renamed.py"  # the table of old names
)
TESTS = sorted(path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__).resolve())
_FENCE = re.compile(r"^( *)(```+).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
_DELIMITERS = re.compile(r"^\s*\|[\s|:-]+\|\s*$")
_MARKS = re.compile(r"^\s*(?:[-*+]|\d+\.|#+|>|!!!\s\w+|===)\s+")


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and cells of tables, without code and addresses."""
    text = _FENCE.sub("\n\n", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>]+>", "", text)
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_row = line.lstrip().startswith("|")
        if not line.strip() or is_row or _MARKS.match(line):
            yield " ".join(paragraph)
            paragraph = []
        if is_row:
            yield from line.strip().strip("|").split("|")
        else:
            paragraph.append(_MARKS.sub("", line).strip())
    yield " ".join(paragraph)


def broken_rules(text: str) -> Iterator[str]:
    """Yield a line for each word, sentence, semicolon and table that breaks a rule."""
    for paragraph in _paragraphs(text):
        yield from (
            f"word: {found[0]!r} in {paragraph[:60]!r}" for found in WORDS.finditer(paragraph)
        )
        yield from (f"semicolon: {paragraph[:80]!r}" for _ in range(paragraph.count(";")))
        for sentence in re.split(r"(?<=[.!?:])\s+", paragraph):
            if (length := len(sentence.split())) > LONGEST:
                yield f"sentence of {length} words: {sentence[:80]!r}"
    lines = _FENCE.sub("\n", text).splitlines()
    for above, line in pairwise(lines):
        if _DELIMITERS.match(line) and any(
            not cell.strip() for cell in above.strip()[1:-1].split("|")
        ):
            yield f"table without a header: {above!r}"


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_page_breaks_no_more_language_rules_than_before(page: Path) -> None:
    found = list(broken_rules(page.read_text()))
    assert len(found) <= json.loads(COUNTS.read_text()).get(_name(page), 0), "\n".join(found)


def _prose_of_tests(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names of functions and classes, docstrings and comments, with their lines."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_code_has_no_private_words() -> None:
    lines = [
        (path, number, line)
        for path in CODE
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    lines += [(path, number, text) for path in TESTS for number, text in _prose_of_tests(path)]
    found = [
        f"{_name(path)}:{number}: {word[0]}"
        for path, number, line in lines
        for word in IDENTIFIERS.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name", ["_told", "told_at", "TellPlan", "MAX_STRANGERS", "_let_in", "# tell"]
)
def test_a_private_word_in_an_identifier_is_found(name: str) -> None:
    assert IDENTIFIERS.search(name)
    assert not IDENTIFIERS.search("threshold satellite calendar suspect_after_s blended")


@pytest.mark.parametrize(
    "text, count",
    [
        ("The router rejects requests. `a; b` is code.", 0),
        ("Nobody is told; it goes on.", 4),
        ("word " * 36, 1),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n", 0),
        ("| a | |\n|---|---|\n| 1 | 2 |\n", 1),
        ("```sh\ntell; tell\n```\n", 0),
        ("- " + "word " * 30 + "\n- " + "word " * 30, 0),
    ],
)
def test_a_broken_rule_is_found(text: str, count: int) -> None:
    assert len(list(broken_rules(text))) == count


def main(arguments: list[str]) -> None:
    if arguments == ["--record"]:
        counts = {_name(page): len(list(broken_rules(page.read_text()))) for page in PAGES}
        counted = {name: count for name, count in counts.items() if count}
        COUNTS.write_text(json.dumps(counted, indent=1) + "\n")
        return
    for page in arguments:
        for line in broken_rules(Path(page).read_text()):
            print(f"{page}: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
