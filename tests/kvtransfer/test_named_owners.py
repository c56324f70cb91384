"""Pairing of a node with owners that a message has named."""

from kvtransfer.pairs.named_owners import MAX_OWNERS, REMEMBERED_S, NamedProducers


class Dialled:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[frozenset[str]] = []
        self.owners = NamedProducers("me:1", self.calls.append, lambda: self.now)


def test_who_is_named_is_dialled_once_and_never_the_node_itself() -> None:
    dialled = Dialled()
    dialled.owners.name(["me:1"])
    assert dialled.calls == []
    dialled.owners.name(["a:1", "me:1"])
    dialled.owners.name(["a:1"])
    dialled.owners.name(["b:1", "a:1"])
    assert dialled.calls == [{"a:1"}, {"a:1", "b:1"}]


def test_who_was_named_long_ago_is_let_go() -> None:
    dialled = Dialled()
    dialled.owners.name(["a:1", "b:1"])
    dialled.now = REMEMBERED_S
    dialled.owners.name(["b:1"])
    dialled.now += 1.0
    dialled.owners.name(["c:1"])
    assert dialled.calls[-1] == {"b:1", "c:1"}


def test_of_too_many_those_named_last_stay() -> None:
    dialled = Dialled()
    dialled.owners.name([f"{n}:1" for n in range(1, MAX_OWNERS + 1)])
    dialled.owners.name(["1:1", "new:1"])
    assert len(dialled.calls[-1]) == MAX_OWNERS
    assert {"1:1", "new:1"} <= dialled.calls[-1] and "2:1" not in dialled.calls[-1]


def test_who_is_listed_is_dialled_as_long_and_who_is_named_besides() -> None:
    dialled = Dialled()
    dialled.owners.listed(frozenset({"a:1", "b:1"}))
    dialled.owners.name(["b:1", "c:1"])
    assert dialled.calls == [{"a:1", "b:1"}, {"a:1", "b:1", "c:1"}]
    dialled.owners.listed(frozenset({"a:1"}))
    assert len(dialled.calls) == 2
    dialled.now = REMEMBERED_S + 1.0
    dialled.owners.listed(frozenset({"d:1"}))
    assert dialled.calls[-1] == {"d:1"}
