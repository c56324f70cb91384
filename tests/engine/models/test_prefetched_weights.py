"""While weights are loaded, the next tensors are prefetched, and the progress is logged."""

import os

import torch

from engine.models import load
from engine.models.checkpoint import Checkpoint, OpenFiles
from engine.models.weights import reader
from tests.support.models.checkpoints import make_checkpoint


def test_every_tensor_is_prefetched_before_it_is_read_and_not_all_at_once(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path, max_shard_size="100KB")
    tensors = Checkpoint(directory).tensors
    assert len({tensor.path for tensor in tensors.values()}) > 2
    largest = max(tensor.num_bytes for tensor in tensors.values())
    monkeypatch.setattr(reader, "AHEAD_BYTES", largest)
    asked, read, watched = [], [], reader.ReadAhead.reads

    def advise(file, offset, num_bytes, advice):
        asked.append((os.readlink(f"/proc/self/fd/{file}"), offset, num_bytes, advice))

    def reads(self, name):
        watched(self, name)
        read.append(tensors[name].num_bytes)
        wanted = str(tensors[name].path), tensors[name].offset, tensors[name].num_bytes
        assert (*wanted, os.POSIX_FADV_WILLNEED) in asked
        assert sum(num_bytes for *_, num_bytes, _ in asked) < sum(read) + 2 * largest

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(reader.ReadAhead, "reads", reads)
    load(directory, torch.device("cpu"), torch.float32)
    assert len(asked) == len(read) == len(tensors)


def test_the_progress_of_loading_is_logged(tmp_path, monkeypatch, caplog):
    directory = make_checkpoint(tmp_path)
    monkeypatch.setattr(reader, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level("INFO", reader.__name__):
        load(directory, torch.device("cpu"), torch.float32)
    lines = [record.message for record in caplog.records if record.name == reader.__name__]
    shares = [int(line.partition("read=")[2].strip("\"'").split()[0]) for line in lines]
    assert shares == sorted(shares) and 0 < shares[0] < 50 and shares[-1] == 100


def test_a_fast_load_logs_no_progress(tmp_path, caplog):
    directory = make_checkpoint(tmp_path)
    now = 5.0
    told = reader.ReadAhead(Checkpoint(directory).tensors, OpenFiles(), clock=lambda: now)
    with caplog.at_level("INFO", reader.__name__):
        for name in Checkpoint(directory).tensors:
            told.reads(name)
        assert not caplog.records
        now += reader.LOG_INTERVAL_S
        told.reads(name)
    assert "100 %" in caplog.records[0].message
