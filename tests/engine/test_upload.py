"""One copy for all tensors of a step: same values, aligned, and always in the same places."""

import numpy as np
import torch

from engine.batch.upload import PaddedBlock, packed_bytes, upload

CPU = torch.device("cpu")


def columns(last):
    return [
        np.arange(3, dtype=np.int32),
        np.arange(5),
        np.random.default_rng(0).random((2, 7), np.float32),
        np.zeros(0, np.int32),
        np.arange(last, dtype=np.int32),
    ]


def test_values_shapes_and_dtypes_arrive_aligned():
    given = columns(9)
    into = torch.zeros(packed_bytes(given), dtype=torch.uint8)
    uploaded = upload(given, CPU, into)
    for before, after in zip(given, uploaded, strict=True):
        assert before.dtype == after.numpy().dtype and np.array_equal(before, after)
        assert (after.data_ptr() - into.data_ptr()) % 16 == 0


def test_a_tensor_lies_where_the_sizes_before_it_say():
    into = torch.zeros(10_000, dtype=torch.uint8)
    places = [[t.data_ptr() for t in upload(columns(last), CPU, into)] for last in (1, 1000)]
    assert places[0] == places[1]


def test_padding_follows_what_a_step_has_and_the_rest_lies_behind_it():
    """A second copy has the rest if the block has no room for it."""
    whole = [np.full(4, -1), np.zeros(3, np.int32)]
    mine = [np.arange(2), np.arange(1, 2, dtype=np.int32)]
    others = columns(40)
    for room in (4000, packed_bytes(whole)):
        into, padding = torch.zeros(room, dtype=torch.uint8), PaddedBlock(whole)
        fixed = upload(whole, CPU, into)
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
