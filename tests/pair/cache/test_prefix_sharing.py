"""Prefixes that a node reads from the cache of another one. Responses are those of a node that
computes everything, whatever the other nodes have, send or do."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.config import PrefixSharingConfig
from common.request import PrefixHint
from kvtransfer.messages import OpenHandoff, PagesReady, Prefix, ReadsDone
from tests.pair.conftest import Known
from tests.pair.rig import ALWAYS_SHARES, Asked, Node, PairRig, Size, prompt

ROOM = Size(num_pages=256)
SMALL = Size(num_pages=40)
TWO = (ROOM, ROOM)
SALTED = b"s" * 16
HINT = PrefixHint("prefill-0:1", 96)  # at the first of two prefill nodes
PAGE = 16


def rig_of(known: Known, **how: object) -> PairRig:
    fields = {"prefill": (ROOM,), "decode": (ROOM,), "prefix_sharing": ALWAYS_SHARES, **how}
    return PairRig(known.loaded, **fields)  # type: ignore[arg-type]


def ways(node: Node) -> tuple[int, int, int]:
    """Return the numbers of tokens from the node's own cache, from other nodes, and computed."""
    return tuple(node.count(f"prompt_token_ways/{way}") for way in ("own", "fetched", "computed"))


def since(node: Node, before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(ways(node), before, strict=True))


def opened(rig: PairRig) -> list[OpenHandoff]:
    """Return the prefixes that were requested."""
    return [one for one in rig.wires.said(OpenHandoff) if isinstance(one.source, Prefix)]


def answered(rig: PairRig, known: Known, asked: Asked) -> None:
    rig.run(asked)
    assert asked.tokens == known.greedy(asked.prompt, len(asked.tokens)) and asked.tokens


@contextmanager
def cached_at_first(known: Known, num_tokens: int = 100, **how: object) -> Iterator[PairRig]:
    """Two prefill nodes, of which only the first has this prompt in its cache."""
    with rig_of(known, **{"prefill": TWO, **how}) as rig:
        rig.learn_what_computing_takes()
        answered(rig, known, rig.ask(prompt(num_tokens), 2, prefill=[0]))
        rig.flush(rig.decode[0])
        yield rig


def test_the_next_turn_is_read_from_the_node_of_the_last_response(known: Known) -> None:
    with rig_of(known) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        rig.learn_what_computing_takes()
        first = rig.ask(prompt(50), 60)
        answered(rig, known, first)
        longer = [*prompt(50), *first.tokens, *prompt(20, 3)]
        before = ways(prefill)
        answered(rig, known, rig.ask(longer, 10))
        # Of 50 + 60 + 20 tokens the prefill node had 3 pages, the decode node has 109.
        assert since(prefill, before) == (48, 48, 34)
        assert (
            decode.count("prefix_loans/completed") == prefill.count("prefix_fetches/completed") == 1
        )
        # It is now in the tree, so the next request needs no other node.
        before = ways(prefill)
        answered(rig, known, rig.ask([*longer, 1, 2, 3], 10))
        assert since(prefill, before)[1] == 0


def test_a_decode_node_that_prefills_itself_reads_prefixes_from_another_one(known: Known) -> None:
    with rig_of(known, prefill=(), decode=TWO, mode="colocated") as rig:
        rig.learn_what_computing_takes()
        first = rig.ask(prompt(60), 30, node=0)
        answered(rig, known, first)
        longer = [*prompt(60), *first.tokens, *prompt(9, 3)]
        before = ways(rig.decode[1])
        asked = rig.ask(longer, 10, node=1, prefix_hints=[PrefixHint("decode-0:1", 80)])
        answered(rig, known, asked)
        assert since(rig.decode[1], before) == (0, 80, 19)
        assert asked.cached_tokens == 80


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next", "gemma3_text"])
def test_a_prefill_node_reads_pages_states_and_windows_from_another_one(model, architecture):
    known = model(architecture)
    with cached_at_first(known, 130, chunked_prefill_tokens=32) as rig:
        before, rest = ways(rig.prefill[1]), [*prompt(130), *prompt(30, 7)]
        hints = [PrefixHint("prefill-0:1", 128)]
        answered(rig, known, rig.ask(rest, 20, prefill=[1], prefix_hints=hints))
        assert since(rig.prefill[1], before) == (0, 128, 32)


def test_a_node_with_wrong_hints_computes_the_prompt(known: Known) -> None:
    with cached_at_first(known, 70) as rig:
        (_, second) = rig.prefill
        # The hints name another prompt, too long a prefix, an unknown node, and an unknown prompt.
        for number, (tokens, hint) in enumerate(
            (
                (prompt(90, 5), PrefixHint("prefill-0:1", 80)),
                (prompt(120), PrefixHint("prefill-0:1", 112)),
                (prompt(90, 6), PrefixHint("nobody:1", 80)),
                (prompt(90, 7), PrefixHint("prefill-0:1", 1 << 31)),
            )
        ):
            answered(rig, known, rig.ask(tokens, 3, prefill=[1], prefix_hints=[hint]))
            assert len(opened(rig)) == (1, 2, 2, 3)[number]
        assert second.count("prompt_token_ways/fetched") == 64
        assert second.count("prefix_fetches/failed") == 2
        assert second.count("prefix_fetches/unpaired") == 1
        assert rig.prefill[0].count("prefix_loans/refused") == 2


def test_prefixes_of_another_namespace_are_not_read(known: Known) -> None:
    with rig_of(known, prefill=TWO) as rig:
        rig.learn_what_computing_takes()
        answered(rig, known, rig.ask(prompt(100), 2, prefill=[0], namespace=SALTED))
        rig.flush(rig.decode[0])
        answered(rig, known, rig.ask(prompt(100), 2, prefill=[1], prefix_hints=[HINT]))
        assert rig.prefill[1].count("prompt_token_ways/fetched") == 0
        rig.flush(*rig.decode, rig.prefill[1])
        again = rig.ask(prompt(100), 2, prefill=[1], prefix_hints=[HINT], namespace=SALTED)
        answered(rig, known, again)
        assert rig.prefill[1].count("prompt_token_ways/fetched") == 96


@pytest.mark.parametrize("what", ["the read fails", "the stream is cut", "a byte is wrong"])
def test_a_failed_read_costs_only_time(known: Known, what: str) -> None:
    with cached_at_first(known) as rig:
        match what:
            case "the read fails":
                rig.faults[0].fail_next("the test wants it")
            case "a byte is wrong":
                rig.faults[0].corrupt_next()
            case _:
                rig.wires.hold_back(PagesReady)
        asked = rig.ask(prompt(100), 20, prefill=[1], prefix_hints=[HINT])
        if what == "the stream is cut":
            rig.until(lambda: opened(rig), "it asks")
            rig.wires.cut(rig.prefill[0].front, rig.prefill[1].front)
            rig.wires.release()
        answered(rig, known, asked)
        rig.wires.heal()
        assert rig.prefill[1].count("prefix_fetches/failed") == 1
        assert rig.prefill[1].count("prompt_token_ways/fetched") == 0


def test_pages_being_read_outlive_their_eviction_from_the_tree(known: Known) -> None:
    with cached_at_first(known) as rig:
        producer, consumer = rig.prefill
        rig.wires.hold_back(ReadsDone)
        asked = rig.ask(prompt(100), 20, prefill=[1], prefix_hints=[HINT])
        rig.until(lambda: producer.pages("publication") == 6, "it is lent")
        producer.role.scheduler.flush_cache()
        assert producer.pages("publication") == 6
        rig.wires.release()
        answered(rig, known, asked)
        assert consumer.count("prompt_token_ways/fetched") == 96
        assert producer.pages("cache") == 0


def test_a_prefix_without_free_pages_is_computed(known: Known) -> None:
    with cached_at_first(known, prefill=(ROOM, Size(num_pages=8)), page_size=16) as rig:
        # Pages for one prompt of 100 tokens: another prompt that is being computed has them.
        rig.faults[1].freeze()
        busy = rig.ask(prompt(90, 9), 2, prefill=[1])
        rig.until(lambda: rig.prefill[1].queue("inflight"), "it has the pages")
        asked = rig.ask(prompt(100), 20, prefill=[1], prefix_hints=[HINT])
        rig.until(lambda: rig.prefill[1].count("prefix_fetches/no_capacity"), "it is not tried")
        rig.faults[1].release()
        rig.run(busy)
        answered(rig, known, asked)
        assert not opened(rig)


def test_the_part_of_the_pool_that_is_read_at_once_is_limited(known: Known) -> None:
    with cached_at_first(known, 120, prefill=(Size(num_pages=40), ROOM)) as rig:
        hint = PrefixHint("prefill-0:1", 112)  # 7 pages, of which 5 may be read
        answered(rig, known, rig.ask(prompt(120), 20, prefill=[1], prefix_hints=[hint]))
        assert rig.prefill[0].count("prefix_loans/refused") == 1


def test_a_request_cancelled_during_a_read_leaves_no_resources(known: Known) -> None:
    with cached_at_first(known) as rig:
        rig.wires.hold_back(ReadsDone)
        asked = rig.ask(prompt(100), 20, prefill=[1], prefix_hints=[HINT])
        rig.until(lambda: rig.prefill[1].queue("fetching"), "it waits for its prefix")
        rig.cancel(asked)
        rig.run(asked)
        rig.wires.release()


def test_requests_for_the_same_prefix_read_it_once(known: Known) -> None:
    with cached_at_first(known) as rig:
        rig.wires.hold_back(ReadsDone)
        both = [
            rig.ask([*prompt(100), *prompt(20, seed)], 9, prefill=[1], prefix_hints=[HINT])
            for seed in (3, 4)
        ]
        rig.until(lambda: rig.prefill[1].queue("fetching") == 2, "both wait")
        rig.wires.release()
        for asked in both:
            answered(rig, known, asked)
        assert len(opened(rig)) == 1


def test_a_node_with_sharing_disabled_neither_reads_nor_serves_prefixes(known: Known) -> None:
    with rig_of(known, prefill=TWO, prefix_sharing=PrefixSharingConfig(enabled=False)) as rig:
        rig.learn_what_computing_takes()
        answered(rig, known, rig.ask(prompt(100), 2, prefill=[0]))
        answered(rig, known, rig.ask(prompt(100), 2, prefill=[1], prefix_hints=[HINT]))
        assert not opened(rig)


def test_conversations_alternate_between_nodes_that_evict(known: Known) -> None:
    """Correct hints, wrong ones, and pools in which all pages are soon evicted."""
    source = random.Random(11)
    with rig_of(known, prefill=(SMALL, SMALL), decode=(SMALL, SMALL)) as rig:
        rig.learn_what_computing_takes()
        addresses = [node.front.address for node in rig.nodes]
        talks = [prompt(30, seed) for seed in range(4)]
        for _ in range(4):
            asked = []
            for talk in talks:
                hints = [
                    PrefixHint(address, source.choice((len(talk), 48, 400)))
                    for address in source.sample(addresses, 2)
                ]
                asked.append(
                    rig.ask(
                        talk,
                        source.randrange(3, 25),
                        node=source.randrange(2),
                        prefill=[source.randrange(2)],
                        prefix_hints=hints,
                    )
                )
            for talk, one in zip(talks, asked, strict=True):
                answered(rig, known, one)
                talk += [*one.tokens, *prompt(source.randrange(2, 20), source.randrange(9))]
        assert sum(node.count("prefix_fetches/completed") for node in rig.prefill)
