"""Warmup batches are as large as any batch in service."""

import torch

from engine.runner.rehearsal import mixed_rehearsal, verify_rehearsal


def test_a_prompt_of_the_warmup_attends_to_all_of_itself():
    """Memory is measured with it, and kernels are chosen by lengths."""
    batch = mixed_rehearsal(num_tokens=70, num_rows=5, num_tables=1, page_size=16)
    assert batch.lengths.tolist() == [66, 0, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 66, 67, 68, 69, 70]
    assert len(batch.page_ids) == 5
    assert len(batch.sampled) == 5


def test_the_warmup_drafts_as_many_rows_as_a_step_may_sample_tokens():
    """The memory that layers need for drafts is measured with the largest number of sampled
    tokens."""
    batch, told = verify_rehearsal(num_rows=3, num_tables=2, page_size=1, state_pages=2)
    assert (told.ends - told.starts).tolist() == [2, 2, 2]
    assert batch.query_starts.tolist() == [0, 2, 4, 6]
    assert sorted(batch.sampled.tolist()) == [0, 1, 2, 3, 4, 5]
    assert batch.sampled[:3].tolist() == [1, 3, 5]
    assert len(batch.page_ids) == 2
    on_device, _ = batch.to(torch.device("cpu"))
    assert on_device.states_after(on_device.lengths).num_rows == 3
