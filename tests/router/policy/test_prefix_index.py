"""The prefix index, compared with a model that remembers everything, and its limits."""

import random

import pytest

from common.errors import ProtocolViolation
from common.request import PrefixHint
from common.requests.namespace import SHARED, Namespace, namespace_of, page_names
from router.policy import prefix_index
from router.policy.load import PlacementDecision, PlacementKey
from router.policy.prefix_index import STRIDE, PrefixIndex, PromptPrefixes

SIZE = 16


def names(tokens: list[int], page_size: int = SIZE, namespace: Namespace = SHARED) -> list[int]:
    return page_names(tokens, page_size, namespace)


def cached(
    index: PrefixIndex, tokens: list[int], address: str, namespace: Namespace = SHARED
) -> int:
    return index.cached_tokens(PromptPrefixes(tokens, namespace), address)


def prompt(rng: random.Random) -> list[int]:
    """Return one of a few prompts, most of which share a prefix."""
    pages = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    return [page for page in pages for _ in range(SIZE)] + [7] * rng.randrange(SIZE)


def in_common(one: list[int], other: list[int]) -> int:
    pages = zip(names(one), names(other), strict=False)
    count = 0
    for a, b in pages:
        if a != b:
            break
        count += 1
    return count * SIZE


@pytest.mark.parametrize("seed", range(10))
def test_the_index_knows_the_longest_reported_prefix_of_each_node(seed):
    """In the model, every node is a list of prompts, and its cache is the set of their prefixes."""
    rng = random.Random(seed)
    index = PrefixIndex()
    nodes: dict[str, list[list[int]]] = {"p0": [], "p1": [], "p2": []}
    for _ in range(300):
        address = rng.choice(list(nodes))
        mine = nodes[address]
        before = {page for tokens in mine for page in names(tokens)}
        cleared = not rng.randrange(20)
        if cleared:
            mine.clear()
            before = set()
        elif mine and rng.randrange(2):
            mine.remove(rng.choice(mine))
        else:
            mine.append(prompt(rng))
        now = {page for tokens in mine for page in names(tokens)}
        index.changed(address, SIZE, cleared=cleared, stored=now - before, removed=before - now)
        wanted = prompt(rng)
        for each, prompts in nodes.items():
            longest = max((in_common(wanted, tokens) for tokens in prompts), default=0)
            assert cached(index, wanted, each) == longest


def test_a_placed_prompt_is_expected_before_the_node_reports_it():
    index = PrefixIndex()
    index.changed("p0", SIZE, cleared=True)
    tokens = [1] * (5 * STRIDE + 3)
    assert cached(index, tokens, "p0") == 0
    index.placed(PromptPrefixes(tokens), "p0")
    assert cached(index, [*tokens, 2, 3], "p0") == 5 * STRIDE
    assert cached(index, tokens, "p1") == 0
    index.changed("p0", SIZE, cleared=False, stored=names(tokens))
    assert cached(index, tokens, "p0") == 5 * STRIDE
    gone = names(tokens)[2 * STRIDE // SIZE + 1 :]
    index.changed("p0", SIZE, cleared=False, removed=gone)
    assert cached(index, tokens, "p0") == 2 * STRIDE + SIZE


def test_neither_reported_nor_placed_prompts_are_visible_in_another_namespace():
    index = PrefixIndex()
    one, other = namespace_of("one"), namespace_of("other")
    reported, placed = [1] * (2 * STRIDE), [2] * (2 * STRIDE)
    index.changed("p0", SIZE, cleared=True, stored=names(reported, namespace=one))
    index.placed(PromptPrefixes(placed, one), "p0")
    for tokens in (reported, placed):
        found = [cached(index, tokens, "p0", each) for each in (one, other, SHARED)]
        assert found == [2 * STRIDE, 0, 0]
    index.changed("p0", SIZE, cleared=False, removed=names(reported, namespace=other))
    assert cached(index, reported, "p0", one) == 2 * STRIDE


def test_placed_prompts_that_are_never_reported_expire():
    now = 0.0
    index = PrefixIndex(clock=lambda: now)
    index.changed("p0", SIZE, cleared=True)
    cancelled = [1] * (3 * STRIDE)
    index.placed(PromptPrefixes(cancelled), "p0")
    for _ in range(3):
        now += prefix_index.HISTORY_S + 1
        assert cached(index, cancelled, "p0") in (0, 3 * STRIDE)
        index.placed(PromptPrefixes([2] * STRIDE), "p0")
    assert cached(index, cancelled, "p0") == 0


def test_placed_prompts_of_a_node_without_reports_are_limited_and_the_oldest_dropped(monkeypatch):
    monkeypatch.setattr(prefix_index, "MAX_HISTORY", 40)
    index = PrefixIndex()
    prompts = [[number] * (4 * STRIDE) for number in range(30)]
    for tokens in prompts:
        index.placed(PromptPrefixes(tokens), "p0")
    known = [bool(cached(index, tokens, "p0")) for tokens in prompts]
    assert known[-5:] == [True] * 5
    assert sum(known) <= 10
    assert known == sorted(known)


def test_a_node_that_stops_reporting_loses_its_entries_and_placed_prompts_count_again():
    index = PrefixIndex()
    reported, placed = [1] * (2 * STRIDE), [2] * (2 * STRIDE)
    index.changed("p0", SIZE, cleared=True, stored=names(reported))
    index.silent("p0")
    index.placed(PromptPrefixes(placed), "p0")
    assert cached(index, reported, "p0") == 0
    assert cached(index, placed, "p0") == 2 * STRIDE
    index.forget("p0")
    assert cached(index, placed, "p0") == 0


def test_a_node_cannot_use_more_than_its_share_of_the_index(monkeypatch):
    monkeypatch.setattr(prefix_index, "MAX_PAGES", 100)
    index = PrefixIndex()
    for start in range(0, 1000, 50):
        index.changed("p0", SIZE, cleared=False, stored=range(start, start + 50))
    assert index.num_pages("p0") == 100


@pytest.mark.parametrize("page_size", [0, prefix_index.MAX_PAGE_SIZE + 1])
def test_an_invalid_page_size_is_rejected(page_size):
    with pytest.raises(ProtocolViolation, match=str(page_size)):
        PrefixIndex().changed("p0", page_size, cleared=True)


def test_each_node_has_its_own_page_size():
    index = PrefixIndex()
    tokens = list(range(100))
    index.changed("p0", 16, cleared=True, stored=names(tokens, 16))
    index.changed("p1", 32, cleared=True, stored=names(tokens, 32))
    pages = PromptPrefixes(tokens)
    assert index.cached_tokens(pages, "p0") == 96
    assert index.cached_tokens(pages, "p1") == 96
    assert index.cached_tokens(PromptPrefixes(tokens[:63]), "p1") == 32


# Hints --------------------------------------------------------------------------------------------


PROMPT = [(7 * n + n * n) % 250 for n in range(330)]
P0_ON_D0 = PlacementDecision("d0", ("p0", "p1"), len(PROMPT))


def index_of(**pages: int) -> PrefixIndex:
    """Return nodes that have reported this number of pages of the prompt."""
    index = PrefixIndex()
    for address, count in pages.items():
        stored = page_names(PROMPT, SIZE)[:count]
        index.changed(address, SIZE, cleared=True, stored=stored)
    return index


def hints(
    index: PrefixIndex, placement: PlacementDecision = P0_ON_D0, namespace: Namespace = SHARED
):
    return index.hints(PlacementKey(PROMPT, "", namespace), placement)


def test_hints_name_the_three_nodes_with_most_pages_except_both_ends_of_the_hand_off():
    index = index_of(p0=1, p1=8, d0=20, d1=12, d2=10, p2=9, d3=4)
    assert hints(index) == (PrefixHint("d1", 192), PrefixHint("d2", 160), PrefixHint("p2", 144))


def test_hints_name_no_node_for_a_few_more_pages():
    assert hints(index_of(p0=8, p1=11)) == ()
    assert hints(index_of(p0=8, p1=12)) == (PrefixHint("p1", 192),)


def test_hints_for_a_local_prefill_exclude_the_decode_nodes_own_pages():
    alone = PlacementDecision("d0", (), len(PROMPT))
    assert hints(index_of(d0=10, d1=11), alone) == ()
    assert hints(index_of(d0=2, d1=11), alone) == (PrefixHint("d1", 176),)


def test_placed_and_unreported_prompts_cause_no_hint():
    index = index_of(p0=0, d1=0)
    index.placed(PromptPrefixes(PROMPT), "p1")
    assert hints(index) == ()


def test_hints_name_no_node_for_another_namespace():
    assert hints(index_of(p1=16), namespace=namespace_of("mine")) == ()
