"""Prompts whose prefix has been forgotten by the cache, and is brought back from host memory: the
answers are those of a node that computes everything, whatever the pages hold."""

from dataclasses import replace

import pytest

from common.request import PrefixHint
from kvtransfer.messages import PagesReady
from tests.pair.conftest import Known
from tests.pair.rig import ALWAYS_SHARES, Node, PairRig, Size, prompt
from tests.support.engine_rig import ints

ROOM = Size(num_pages=1024)
LONG = 150
ANSWER = 6
TURNS = 2
CHUNKS = {"chunked_prefill_tokens": 64}
# Of keys and values, with windows, with states, of latents, in 8 bits; and whether a prefill node
# computes them.
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
    """Room for one request and a half, and below for all there are."""
    tables = known.tables(16, kv_dtype)
    num_pages = tables.pages_to_compute(LONG + TURNS * ANSWER)
    room = num_pages + max(num_pages // 2, tables.state_pages)  # the state is copied to be kept
    return Size(num_pages=room, tier_pages=20 * num_pages, kv_dtype=kv_dtype)


def brought(node: Node) -> int:
    return node.engine.tiers.host_tokens + node.engine.tiers.file_tokens


def one_by_one(rig: PairRig, prompts: list[list[int]]) -> list[list[int]]:
    """Answers; whatever is to be copied has been, before the next one."""
    answers = []
    for each in prompts:
        asked = rig.ask(each, ANSWER)
        rig.run(asked)
        rig.until_free()
        answers.append(asked.tokens)
    return answers


def in_turns(known: Known, size: Size, kv_dtype: str, *, prefill: bool) -> tuple[Node, list[int]]:
    """Conversations; the node that computes them, and all tokens."""
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
def test_answers_are_the_same_wherever_the_pages_have_been(model, architecture, kv_dtype, prefill):
    known = model(architecture)
    node, reported = in_turns(known, small(known, kv_dtype), kv_dtype, prefill=prefill)
    _, alone = in_turns(known, Size(num_pages=1024, kv_dtype=kv_dtype), kv_dtype, prefill=prefill)
    assert reported == alone
    if architecture in ("qwen3", "deepseek_v3"):  # all that was said before, but the last page
        assert brought(node) >= len(PROMPTS) * (TURNS - 1) * (LONG - 16)
    else:  # from places where there were windows, or a state, to go on from
        assert brought(node) >= 64


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_answers_are_the_same_from_files(model, architecture, tmp_path):
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


def test_a_decode_node_reads_only_what_no_tier_of_its_own_has(known: Known) -> None:
    with PairRig(known.loaded, prefill=(ROOM,), decode=(small(known),), **CHUNKS) as rig:
        one_by_one(rig, PROMPTS)
        before = len(rig.wires.seen)
        (again,) = one_by_one(rig, PROMPTS[:1])
        assert again == known.greedy(PROMPTS[0], ANSWER)
        handed = [said for said in list(rig.wires.seen)[before:] if isinstance(said, PagesReady)]
        assert sum(len(said.pages) for said in handed) == 1  # the last, which is not full
        assert brought(rig.decode[0]) == LONG // 16 * 16


# So much of it is lent at once that a prompt fits.
LENDS = Size(num_pages=80, tier_pages=400)
TOLD = LONG // 16 * 16


def forget_above(rig: PairRig) -> None:
    """The first prefill node's cache has room for others only, and the decode node has nothing."""
    for seed in range(11, 15):
        rig.run(rig.ask(prompt(400, seed), 1, prefill=[0]))
        rig.until_free()
    assert not rig.prefill[0].engine.cache.match(ints(PROMPTS[0])).num_tokens
    rig.flush(rig.decode[0])


def test_others_read_what_only_a_tier_has(known: Known) -> None:
    sizes = LENDS, ROOM
    with PairRig(known.loaded, prefill=sizes, decode=(ROOM,), prefix_sharing=ALWAYS_SHARES) as rig:
        rig.learn_what_computing_takes()
        first, second = rig.prefill
        rig.run(rig.ask(PROMPTS[0], ANSWER, prefill=[0]))
        forget_above(rig)
        hint = PrefixHint("prefill-0:1", TOLD)
        asked = rig.ask([*PROMPTS[0], 1, 2], ANSWER, prefill=[1], prefix_hints=[hint])
        rig.run(asked)
        assert asked.tokens == known.greedy([*PROMPTS[0], 1, 2], ANSWER)
        assert second.count("prompt_token_ways/fetched") == TOLD
        assert brought(first) == TOLD and first.count("prefix_loans/completed") == 1


def test_what_a_tier_has_is_not_read_from_others(known: Known) -> None:
    sizes = LENDS, ROOM
    with PairRig(known.loaded, prefill=sizes, decode=(ROOM,), prefix_sharing=ALWAYS_SHARES) as rig:
        rig.learn_what_computing_takes()
        first, _ = rig.prefill
        for producer in range(2):
            rig.run(rig.ask(PROMPTS[0], ANSWER, prefill=[producer]))
        forget_above(rig)
        before = first.count("prompt_token_ways/fetched")
        hint = PrefixHint("prefill-1:1", TOLD)
        rig.run(rig.ask([*PROMPTS[0], 1, 2], ANSWER, prefill=[0], prefix_hints=[hint]))
        assert first.count("prompt_token_ways/fetched") == before and brought(first) == TOLD


def test_a_flush_empties_the_tier_too(known: Known) -> None:
    with PairRig(known.loaded, prefill=(), decode=(small(known),), **CHUNKS) as rig:
        one_by_one(rig, PROMPTS)
        (node,) = rig.decode
        rig.flush(node)
        assert not len(node.engine.tiers.host.index)
        assert one_by_one(rig, PROMPTS[:1]) == [known.greedy(PROMPTS[0], ANSWER)]
        assert not brought(node)
