"""Prompts whose prefix was evicted from the cache and is restored from host memory. Responses
are those of a node that computes everything, whatever the pages contain."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from common.request import PrefixHint
from kvtransfer.messages import PagesReady
from tests.pair.conftest import Known
from tests.pair.rig import ALWAYS_SHARES, Node, PairRig, Size, prompt
from tests.support.engine.engine_rig import ints

ROOM = Size(num_pages=1024)
LONG = 150
ANSWER = 6
TURNS = 2
CHUNKS = {"chunked_prefill_tokens": 64}
# Keys and values, windows, states, latents and 8 bits, with and without a prefill node.
CASES = [
    *[("qwen3", "auto", True), ("gemma3_text", "auto", True), ("qwen3_next", "auto", False)],
    *[("deepseek_v3", "auto", True), ("qwen3", "fp8_e4m3", False)],
    *[
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            *[("qwen3", "auto", False), ("gemma3_text", "auto", False)],
            *[("qwen3_next", "auto", True), ("deepseek_v3", "auto", False)],
            *[("gemma3_text", "fp8_e4m3", True), ("qwen3_next", "fp8_e4m3", True)],
        )
    ],
]


PROMPTS = [prompt(LONG, seed) for seed in range(1, 4)]


def small(known: Known, kv_dtype: str = "auto") -> Size:
    """Return settings with room for one request and a half, and with a tier that has room for
    all."""
    tables = known.tables(16, kv_dtype)
    num_pages = tables.pages_to_compute(LONG + TURNS * ANSWER)
    # the state is copied before it changes
    room = num_pages + max(num_pages // 2, tables.state_pages)
    return Size(num_pages=room, tier_pages=20 * num_pages, kv_dtype=kv_dtype)


def loaded_tokens(node: Node) -> int:
    return node.engine.tiers.host_tokens + node.engine.tiers.file_tokens


def one_by_one(rig: PairRig, prompts: list[list[int]]) -> list[list[int]]:
    """Return the responses. All copies end before the next request."""
    answers = []
    for each in prompts:
        asked = rig.serve(each, ANSWER)
        rig.until_free()
        answers.append(asked.tokens)
    return answers


def in_turns(known: Known, size: Size, kv_dtype: str, *, prefill: bool) -> tuple[Node, list[int]]:
    """Return conversations, the node that computes them, and all tokens."""
    wide = Size(num_pages=1024, kv_dtype=kv_dtype)
    how = {"prefill": (size,), "decode": (wide,)} if prefill else {"prefill": (), "decode": (size,)}
    with PairRig(known.loaded, **CHUNKS, **how) as rig:
        (node,) = rig.prefill if prefill else rig.decode
        talks, reported = PROMPTS, []
        for _ in range(TURNS):
            answers = one_by_one(rig, talks)
            reported += answers
            talks = [[*talk, *answer] for talk, answer in zip(talks, answers, strict=True)]
        return node, reported


@pytest.mark.parametrize("architecture, kv_dtype, prefill", CASES)
def test_responses_are_the_same_from_every_tier(model, architecture, kv_dtype, prefill):
    known = model(architecture)
    node, reported = in_turns(known, small(known, kv_dtype), kv_dtype, prefill=prefill)
    _, alone = in_turns(known, Size(num_pages=1024, kv_dtype=kv_dtype), kv_dtype, prefill=prefill)
    assert reported == alone
    # the whole previous conversation, except for the last page
    if architecture in ("qwen3", "deepseek_v3"):
        assert loaded_tokens(node) >= len(PROMPTS) * (TURNS - 1) * (LONG - 16)
    else:  # from positions with windows or a state to continue from
        assert loaded_tokens(node) >= 64


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_responses_are_the_same_from_files(model, architecture, tmp_path):
    """Use little host memory, and send all requests again to the next process."""
    known = model(architecture)
    size = small(known)
    size = replace(size, swap_pages=0, tier_pages=size.tier_pages // 5, disk_dir=tmp_path)
    reported = []
    for _ in range(2):
        node, tokens = in_turns(known, size, "auto", prefill=False)
        reported.append(tokens)
    assert reported[0] == reported[1] == in_turns(known, ROOM, "auto", prefill=False)[1]
    assert node.engine.tiers.file_tokens >= 64


def test_a_decode_node_reads_only_pages_that_its_own_tiers_lack(known: Known) -> None:
    with PairRig(known.loaded, prefill=(ROOM,), decode=(small(known),), **CHUNKS) as rig:
        one_by_one(rig, PROMPTS)
        before = len(rig.wires.seen)
        (again,) = one_by_one(rig, PROMPTS[:1])
        assert again == known.greedy(PROMPTS[0], ANSWER)
        handed = [said for said in list(rig.wires.seen)[before:] if isinstance(said, PagesReady)]
        assert sum(len(said.pages) for said in handed) == 1  # the last, which is not full
        assert loaded_tokens(rig.decode[0]) == LONG // 16 * 16


# Enough may be read at once for a whole prompt.
LENDS = Size(num_pages=80, tier_pages=400)
TOLD = LONG // 16 * 16


@contextmanager
def evicted(known: Known, *producers: int) -> Iterator[PairRig]:
    """Two prefill nodes. These have computed a prompt, which the first one now has in its tier
    alone, and the decode node has not at all."""
    sizes = LENDS, ROOM
    with PairRig(known.loaded, prefill=sizes, decode=(ROOM,), prefix_sharing=ALWAYS_SHARES) as rig:
        rig.learn_what_computing_takes()
        for producer in producers:
            rig.run(rig.ask(PROMPTS[0], ANSWER, prefill=[producer]))
        for seed in range(11, 15):
            rig.run(rig.ask(prompt(400, seed), 1, prefill=[0]))
            rig.until_free()
        assert not rig.prefill[0].engine.cache.match(ints(PROMPTS[0])).num_tokens
        rig.flush(rig.decode[0])
        yield rig


def test_other_nodes_read_pages_that_only_a_tier_has(known: Known) -> None:
    with evicted(known, 0) as rig:
        first, second = rig.prefill
        hint = PrefixHint("prefill-0:1", TOLD)
        asked = rig.serve([*PROMPTS[0], 1, 2], ANSWER, prefill=[1], prefix_hints=[hint])
        known.check(asked)
        assert second.count("prompt_token_ways/fetched") == TOLD
        assert loaded_tokens(first) == TOLD and first.count("prefix_loans/completed") == 1


def test_pages_in_a_tier_are_not_read_from_other_nodes(known: Known) -> None:
    with evicted(known, 0, 1) as rig:
        first, _ = rig.prefill
        before = first.count("prompt_token_ways/fetched")
        hint = PrefixHint("prefill-1:1", TOLD)
        rig.serve([*PROMPTS[0], 1, 2], ANSWER, prefill=[0], prefix_hints=[hint])
        assert first.count("prompt_token_ways/fetched") == before and loaded_tokens(first) == TOLD


def test_a_flush_empties_the_tier_too(known: Known) -> None:
    with PairRig(known.loaded, prefill=(), decode=(small(known),), **CHUNKS) as rig:
        one_by_one(rig, PROMPTS)
        (node,) = rig.decode
        rig.flush(node)
        assert not len(node.engine.tiers.host.index)
        assert one_by_one(rig, PROMPTS[:1]) == [known.greedy(PROMPTS[0], ANSWER)]
        assert not loaded_tokens(node)
