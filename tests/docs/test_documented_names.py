"""Every flag, command, make target and metric that the documentation names exists."""

import argparse
import contextlib
import re
import shlex
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from cli.completion import command_parser
from cli.main import COMMANDS, commands
from cli.planner import metrics as planner
from node import metrics as node
from router import metrics as router
from tests.support.runner.isolation import ROOT

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tools/bench/**/*.md", "deploy/**/*")
    for path in ROOT.glob(pattern)
    # Dashboards and rules are checked against the metrics by tests/deploy. A change log names flags
    # of older versions, as docs/renames.md does. Pages of docs/benchmarks have the commands of the
    # commits that they measured.
    if path.is_file()
    and path.suffix != ".json"
    and path.name not in ("CHANGELOG.md", "renames.md")
    and path.parent.name != "benchmarks"
)
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
KNOWN = dict(commands())
NODES = ("serve prefill", "serve decode")
PROCESSES = ("serve router", *NODES)
PASSED_ON = {
    "up": NODES,
    "bench compare": NODES,
    "bench break-even": NODES,
    "bench steps": ("serve decode",),
    "check": PROCESSES,
    "config show": PROCESSES,
    "config validate": PROCESSES,
}
FLAGS_INSIDE = {  # a flag whose value holds flags, and of which programs
    "--router-flags": ("serve router",),
    "--colocated-flags": NODES,
    "--disaggregated-flags": NODES,
}
OTHERS = {  # flags of other programs that a document names outside a command
    "docs/load.md": "--tokenizer --endpoint-type --concurrency --backend --endpoint --extra-body "
    "--lora-modules --flush-cache --top-p",
    "docs/kubernetes.md": "--profile",
    "docs/parallel.md": "--ep-num-redundant-experts --eplb-rebalance-num-iterations",
    "deploy/compose.yaml": "--profile",
    "deploy/Dockerfile": "--build-arg",
}
BENCHES = ("load", "compare", "steps", "break-even")
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w.-]*\w")
METRIC = re.compile(r"\bbaton_[a-z0-9_]+\*?")
MODULE = re.compile(
    r"\b(?:tools\.(?:bench|demo)|docs\.generate|tests\.(?:attack|chaos))(?:\.[a-z_]+)?(?=[ `\n])"
)
TABLE = re.compile(
    r"^\|[^\n]* all begin with `(--[\w.-]+\.)` \|[^\n]*\n((?:\|[^\n]*\n)+)", re.MULTILINE
)
FOREIGN = re.compile(r"\b(?:docker|podman|kubectl|pip|apt-get|useradd|FROM)\b")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


# What exists --------------------------------------------------------------------------------------

Flags = dict[str, argparse.Action]


@cache
def _parser(command: str) -> argparse.ArgumentParser:
    return command_parser(command, KNOWN[command])


@cache
def flags_of(command: str) -> Flags:
    """Return the flags of `baton COMMAND`, with those that it passes to the nodes it starts."""
    if command.startswith("bench "):
        parts = [each for each in _parser("bench")._actions if each.dest == "command"]
        assert isinstance(parts[0], argparse._SubParsersAction)
        found = dict(parts[0].choices[command.partition(" ")[2]]._option_string_actions)
    else:
        found = dict(_parser(command)._option_string_actions)
    return found | {
        flag: action
        for role in PASSED_ON.get(command, ())
        for flag, action in flags_of(role).items()
    }


@cache
def all_flags() -> Flags:
    return {
        flag: action
        for name in [*KNOWN, *(f"bench {part}" for part in BENCHES)]
        for flag, action in flags_of(name).items()
    }


@cache
def flags_in_source(module: str) -> frozenset[str]:
    """Return the flags of a module of tools or tests, without importing it."""
    path = ROOT / module.replace(".", "/")
    files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    texts = [
        file.read_text() for file in [*files, *(ROOT / "tools" / "bench" / "support").glob("*.py")]
    ]
    assert files and files[0].is_file(), f"there is no module {module}"
    return frozenset(flag for text in texts for flag in re.findall(r'"(--[a-z][\w-]*)"', text))


@cache
def metrics() -> frozenset[str]:
    declared = (*router.DECLARED, *planner.DECLARED, *node.DECLARED["prefill"])
    every = (*declared, *node.DECLARED["decode"], *node.DECLARED["encode"])
    return frozenset(name for each in every for name in (each.name, *each.sample_names))


# What is documented -------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of the shell blocks and of the backticks of a page."""
    blocks = [body for _, kind, body in FENCE.findall(text) if kind in ("sh", "bash", "shell")]
    for code in [*blocks, *_backticks(text)]:
        for line in code.replace("\\\n", " ").splitlines():
            with contextlib.suppress(ValueError):  # a quotation that spans lines: not a command
                yield from _simple(shlex.split(line, comments=True))


def _backticks(text: str) -> Iterator[str]:
    """Yield the text in backticks outside fenced blocks, even if it contains a line break."""
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("\n\n", text)):
        yield from (code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", paragraph))


def _simple(words: list[str]) -> Iterator[list[str]]:
    """Split at pipes and the like, and drop assignments and the directory of the program."""
    command: list[str] = []
    for word in [*words, ";"]:
        if word in ("|", "&&", "||", ";", "&", ">"):
            while command and ASSIGNMENT.match(command[0]):
                command = command[1:]
            if command:
                yield [command[0].rpartition("/")[2], *command[1:]]
            command = []
        else:
            command.append(word)


def wrong_in(command: list[str]) -> Iterator[str]:
    """Yield the errors in a command of Baton: unknown commands and unknown flags."""
    match command:
        case ["baton", "bench", part, *arguments] if part in BENCHES:
            yield from _wrong_flags(f"bench {part}", arguments)
        case ["baton", group, part, *arguments] if f"{group} {part}" in KNOWN:
            yield from _wrong_flags(f"{group} {part}", arguments)
        case ["baton", name, *arguments] if name in KNOWN:
            yield from _wrong_flags(name, arguments)
        case ["baton", name, *arguments] if name.isidentifier() and name.islower():
            if arguments or name not in COMMANDS:
                yield f"there is no command `{' '.join(command)}`"
        case [python, "-m", module, *arguments] if python.startswith("python"):
            if module.partition(".")[0] in ("tools", "tests", "docs", "protos"):
                given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
                yield from (
                    f"python -m {module} has no {flag}"
                    for flag in given - flags_in_source(module)
                    if flag != "--help"
                )
        case ["make", *words]:
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            targets = takewhile(re.compile("[a-z][a-z-]*").fullmatch, words)
            yield from (f"make has no target {target}" for target in set(targets) - known)


def _wrong_flags(command: str, words: list[str]) -> Iterator[str]:
    flags = flags_of(command)
    for word, following in pairwise([*words, "--"]):
        flag, has_value, value = word.partition("=")
        if not FLAG.fullmatch(flag):
            continue
        if (action := flags.get(flag)) is None:
            yield f"baton {command} has no {flag}"
            continue
        value = value if has_value else following
        if action.nargs == 0:
            if has_value:
                yield f"baton {command} {flag} takes no value"
        elif flag in FLAGS_INSIDE:
            for role in FLAGS_INSIDE[flag]:
                yield from _wrong_flags(role, shlex.split(value))
        elif value.startswith("--"):
            yield f"baton {command} {flag} lacks its value"
        elif value.islower() and (choices := _choices(action)) and value not in choices:
            yield f"baton {command} {flag} cannot be {value}"


def _choices(action: argparse.Action) -> Collection[str]:
    """Return the possible values of a flag, or nothing if it accepts any."""
    if action.choices is None and str(action.metavar).startswith("{"):
        return str(action.metavar).strip("{}").split(",")
    return action.choices or ()


def names_alone(text: str) -> Iterator[str]:
    """Yield flags that are named outside commands: in backticks of their own, tables, comments."""
    for code in _backticks(text):
        if code.startswith("--"):
            yield from FLAG.findall(code)
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("\n\n", text)):
        for line in re.sub(r"`[^`]*`", "", paragraph).replace("\\\n", "").splitlines():
            if not FOREIGN.search(line):
                yield from FLAG.findall(line)
    for prefix, rows in TABLE.findall(text):
        for first in re.findall(r"^\|([^|]*)\|", rows, re.MULTILINE):
            yield from (f"{prefix}{name}" for name in re.findall(r"`([\w-]+)`", first))


def wrong_names(text: str, others: Collection[str] = ()) -> list[str]:
    """Return a sentence for each name in a page that does not exist.

    Args:
        others: flags of other programs, which are not checked.
    """
    tools = {flag for module in MODULE.findall(text) for flag in flags_in_source(module)}
    wrong = [said for command in commands_in(text) for said in wrong_in(command)]
    wrong += [
        f"no program has {flag}"
        for flag in names_alone(text)
        if flag not in all_flags() and flag not in others and flag not in tools
    ]
    wrong += [
        f"no program has the metric {name}"
        for name in METRIC.findall(text)
        if not any(fnmatch(metric, name) for metric in metrics())
    ]
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_a_document_names_only_existing_things(document: Path) -> None:
    others = OTHERS.get(str(document.relative_to(ROOT)), "").split()
    assert wrong_names(document.read_text(), others) == []


@pytest.mark.parametrize(
    "text",
    [
        "`baton serve decode --cache.page-size 64`",
        "`baton\nrollout --onyl=decode`",
        "`baton up --engine.lora.max_rank 32`",
        "`baton up --router-flags '--polcy random'`",
        "`baton api-key me --operatr`",
        "`baton nodes lst`",
        "`baton roll`",
        "`baton serve decode --mode=collocated`",
        "`baton rollout --force=yes`",
        "`baton top --interval --once`",
        "```sh\nX=1 baton \\\n  serve router --no-such | tee log\n```",
        "```sh\nmake up && make testall\n```",
        "`python -m tools.bench.overload --no-such 4`",
        "pages (`--cache.page-size 64`) are",
        "# set --no-such to try",
        "| all begin with `--engine.lora.` | |\n|---|---|\n| `max_rank`, 32 | of one |\n",
        "`baton_no_such_total`",
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str) -> None:
    assert len(wrong_names(text)) == 1
