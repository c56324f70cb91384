"""One copy for all tensors of a step: same values, aligned, and always in the same places."""

import torch

from engine.batch.upload import PaddedBlock, packed_bytes, upload

CPU = torch.device("cpu")


def tensors(last):
    return [
        torch.arange(3, dtype=torch.int32),
        torch.arange(5),
        torch.rand(2, 7),
        torch.zeros(0, dtype=torch.int32),
        torch.arange(last, dtype=torch.int32),
    ]


def test_values_shapes_and_dtypes_arrive_aligned():
    given = tensors(9)
    into = torch.zeros(packed_bytes(given), dtype=torch.uint8)
    uploaded = upload(given, CPU, into)
    for before, after in zip(given, uploaded, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)
        assert (after.data_ptr() - into.data_ptr()) % 16 == 0


def test_a_tensor_lies_where_the_sizes_before_it_say():
    into = torch.zeros(10_000, dtype=torch.uint8)
    places = [[t.data_ptr() for t in upload(tensors(last), CPU, into)] for last in (1, 1000)]
    assert places[0] == places[1]


def test_padding_follows_what_a_step_has_and_the_rest_lies_behind_it():
    """A second copy has the rest if the block has no room for it."""
    whole = [torch.full((4,), -1), torch.zeros(3, dtype=torch.int32)]
    mine = [torch.arange(2), torch.arange(1, 2, dtype=torch.int32)]
    others = tensors(40)
    for room in (4000, packed_bytes(whole)):
        into, padding = torch.zeros(room, dtype=torch.uint8), PaddedBlock(whole)
        fixed = upload(whole, CPU, into)
        for given, expected in ((mine, ([0, 1, -1, -1], [1, 0, 0])), (whole, ([-1] * 4, [0] * 3))):
            sent = padding.upload(given, others, into)
            assert all(map(torch.equal, sent, others))
            assert tuple(each.tolist() for each in fixed) == expected


def test_a_cpu_needs_no_copy():
    given = tensors(2)
    assert all(a is b for a, b in zip(upload(given, CPU), given, strict=True))
