"""Errors of commands that start nodes, for a flag that neither the command nor the node has."""

from functools import partial

import pytest

from bench import __main__ as bench
from cli.up import options as up
from tests.support.refusals import refusal

COMPARE = ["compare", "--model=m"]


@pytest.mark.parametrize(
    "parse, arguments, program, meant",
    [
        (up.parse, ["--decod", "2"], "baton up", "--decode"),
        (up.parse, ["--http-prot=81"], "baton up", "--http-port"),
        (up.parse, ["--engine.cache.page-sise=32"], "baton up", "--engine.cache.page-size"),
        (bench.parse, ["load", "--urll", "x"], "baton bench load", "--url"),
        (bench.parse, ["load", "--url=x", "--reqests=3"], "baton bench load", "--requests"),
        (bench.parse, [*COMPARE, "--repeat=3"], "baton bench compare", "--repeats"),
        (
            bench.parse,
            ["break-even", "--model=m", "--engine.cache.page-sise=32"],
            "baton bench break-even",
            "--engine.cache.page-size",
        ),
    ],
)
def test_the_most_similar_flag_is_suggested_whether_of_the_command_or_the_node(
    capsys, parse, arguments, program, meant
):
    complaint = refusal(capsys, lambda: parse(arguments))
    assert complaint.startswith(f"{program}: ")
    assert f"did you mean {meant}?" in complaint


def test_an_old_flag_of_a_command_or_its_nodes_names_the_new_one(capsys):
    for old, new in (
        ("--exit-on-death", "--exit-on-failure"),
        ("--engine.tiers.host-bytes=3", "--engine.offload.cpu-bytes"),
    ):
        said = refusal(capsys, partial(up.parse, [old]))
        assert said == f"baton up: `{old.partition('=')[0]}` was renamed: use `{new}`"


@pytest.mark.parametrize(
    "parse, arguments", [(up.parse, ["--seldom"]), (bench.parse, [*COMPARE, "--seldom"])]
)
def test_without_a_similar_flag_none_is_suggested(capsys, parse, arguments):
    complaint = refusal(capsys, lambda: parse(arguments))
    assert "unrecognized arguments: --seldom (--help-all lists all options)" in complaint


def test_flags_of_nodes_are_passed_on():
    flags = ["--engine.cache.page-size", "32", "--config=nodes.yaml", "--log-level=warning"]
    options, left = up.parse(["--decode=2", *flags])
    assert (options.models[0].decode.count, left) == (2, flags)


def test_a_word_that_is_no_flag_is_rejected_by_a_command_that_starts_no_node(capsys):
    arguments = ["load", "--url=http://x", "8000"]
    complaint = refusal(capsys, lambda: bench.parse(arguments))
    assert "unrecognized arguments: 8000" in complaint
