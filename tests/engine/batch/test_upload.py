"""One copy for all tensors of a step: the same values, aligned, and always at the same places."""

import numpy as np
import torch
from torch import Tensor

from engine.batch.upload import InputBlock, PaddedBlock, packed_bytes, upload

CPU = torch.device("cpu")


def columns(last):
    return [
        np.arange(3, dtype=np.int32),
        np.arange(5),
        np.random.default_rng(0).random((2, 7), np.float32),
        np.zeros(0, np.int32),
        np.arange(last, dtype=np.int32),
    ]


def test_values_shapes_and_dtypes_are_copied_aligned():
    given = columns(9)
    into = torch.zeros(packed_bytes(given), dtype=torch.uint8)
    uploaded = upload(given, CPU, into)
    for before, after in zip(given, uploaded, strict=True):
        assert before.dtype == after.numpy().dtype and np.array_equal(before, after)
        assert (after.data_ptr() - into.data_ptr()) % 16 == 0


def test_the_place_of_a_tensor_follows_from_the_sizes_before_it():
    into = torch.zeros(10_000, dtype=torch.uint8)
    places = [[t.data_ptr() for t in upload(columns(last), CPU, into)] for last in (1, 1000)]
    assert places[0] == places[1]


def test_the_inputs_of_a_step_are_followed_by_padding_and_other_tensors():
    """A second copy has the rest if the block has no room for it."""
    whole = [np.full(4, -1), np.zeros(3, np.int32)]
    mine = [np.arange(2), np.arange(1, 2, dtype=np.int32)]
    others = columns(40)
    for room in (4000, packed_bytes(whole)):
        into, padding = InputBlock(room, CPU), PaddedBlock(whole)
        fixed = upload(whole, CPU, into.memory)
        for given, expected in ((mine, ([0, 1, -1, -1], [1, 0, 0])), (whole, ([-1] * 4, [0] * 3))):
            sent = padding.upload(given, others, into)
            assert all(map(np.array_equal, sent, others))
            assert tuple(each.tolist() for each in fixed) == expected


def test_a_cpu_needs_no_copy():
    given = columns(2)
    sent = upload(given, CPU)
    assert all(
        np.shares_memory(a.numpy(), b) or not b.size for a, b in zip(sent, given, strict=True)
    )


def test_pinned_memory_grows_with_the_steps():
    into = InputBlock(100_000, CPU)
    for size in (1, 40, 3000, 99_999, 100_000, 5):
        packed = np.random.default_rng(size).bytes(size)
        into.send(packed)
        assert into.memory[:size].numpy().tobytes() == packed


def test_pinned_memory_is_written_again_only_after_its_copy(monkeypatch):
    """Seen failing without the wait, and with a wait after the write."""
    copies: list[tuple[Tensor, bytes]] = []
    pending: dict[int, tuple[Tensor, bytes]] = {}

    def unchanged(source: Tensor, packed: bytes) -> bool:
        return bytes(memoryview(source.numpy())[: len(packed)]) == packed

    class Event:
        """torch.cuda.Event of one pinned block."""

        def record(self) -> None:
            pending[id(self)] = copies[-1]

        def synchronize(self) -> None:
            if id(self) in pending:
                assert unchanged(*pending.pop(id(self)))

    def copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        copies.append((source, packed))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "copy_", copy)
    into = InputBlock(100, torch.device("meta"))
    for number in range(10):
        packed = bytes([number]) * 50
        into.send(packed)
        assert all(unchanged(*each) for each in pending.values())
    assert len(copies) == 10
    assert len(pending) > 2  # the host has at most two steps in flight
