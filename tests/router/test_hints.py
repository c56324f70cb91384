"""Prefix hints: the other holders of a prompt's beginning, sent to the node that computes it."""

from common.addresses import PrefixHint
from common.requests.namespace import SHARED, Namespace, namespace_of, page_names
from router.policy.load import PlacementDecision, PlacementKey
from router.policy.prefix_index import PrefixHints, PrefixIndex, PromptPrefixes

SIZE = 16
PROMPT = [(7 * n + n * n) % 250 for n in range(330)]
P0_ON_D0 = PlacementDecision("d0", ("p0", "p1"), len(PROMPT))


def index_of(**pages: int) -> PrefixIndex:
    """Nodes that have told of so many pages of the prompt."""
    index = PrefixIndex()
    for address, count in pages.items():
        stored = page_names(PROMPT, SIZE)[:count]
        index.changed(address, SIZE, cleared=True, stored=stored)
    return index


def hints(
    index: PrefixIndex, placement: PlacementDecision = P0_ON_D0, namespace: Namespace = SHARED
):
    return PrefixHints(index).of(PlacementKey(PROMPT, "", namespace), placement)


def test_three_who_have_most_are_named_and_neither_end_of_the_hand_off() -> None:
    index = index_of(p0=1, p1=8, d0=20, d1=12, d2=10, p2=9, d3=4)
    assert hints(index) == (PrefixHint("d1", 192), PrefixHint("d2", 160), PrefixHint("p2", 144))


def test_nobody_is_named_for_little_more() -> None:
    assert hints(index_of(p0=8, p1=11)) == ()
    assert hints(index_of(p0=8, p1=12)) == (PrefixHint("p1", 192),)


def test_of_a_decode_node_that_computes_it_itself_its_own_is_what_counts() -> None:
    alone = PlacementDecision("d0", (), len(PROMPT))
    assert hints(index_of(d0=10, d1=11), alone) == ()
    assert hints(index_of(d0=2, d1=11), alone) == (PrefixHint("d1", 176),)


def test_what_was_placed_and_not_told_is_no_hint() -> None:
    index = index_of(p0=0, d1=0)
    index.placed(PromptPrefixes(PROMPT), "p1")
    assert hints(index) == ()


def test_nobody_is_named_for_another_namespace() -> None:
    assert hints(index_of(p1=16), namespace=namespace_of("mine")) == ()
