"""Shards are opened once while a model is loaded, few at a time, and closed afterwards. The next
tensors are prefetched, and the progress is logged. Loading needs little more memory at its peak
than the loaded weights, whose size is reported before."""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from engine.models import load, open_checkpoint, weights
from engine.models.checkpoint import SINGLE, Checkpoint, OpenFiles
from engine.models.linear import onednn
from engine.models.spec import LoadTarget
from tests.support.models.checkpoints import make_checkpoint

CPU = torch.device("cpu")
MOST = 1.15  # of the weights, with the mapped pages of the file
SLACK_BYTES = 24 << 20  # of a fresh process: memory that torch allocates for its first products
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
# In its own process, so that the peak is that of loading.
LOAD = """
import sys
from pathlib import Path
import torch
from engine.models import load
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
torch.set_num_threads(1)
before = status("VmRSS")
model = load(Path(sys.argv[1]), torch.device("cpu"), torch.bfloat16, sys.argv[2])
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def open_shards(directory):
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [link for link in links if link.exists() and link.readlink().parent == directory]


@pytest.fixture
def opened(monkeypatch):
    """Return the names of files, once for each time that a file was opened."""
    names, open_file = Counter(), os.open

    def opens(path, *rest):
        names[Path(path).name] += 1
        return open_file(path, *rest)

    monkeypatch.setattr(os, "open", opens)
    return names


def test_loading_opens_every_shard_once_and_closes_it(tmp_path, opened):
    directory = make_checkpoint(tmp_path, max_shard_size="100KB")
    shards = {path.name for path in directory.glob("*.safetensors")}
    assert len(shards) > 2
    load(directory, CPU, torch.float32)
    assert {name: count for name, count in opened.items() if name in shards} == dict.fromkeys(
        shards, 1
    )
    assert open_shards(directory) == []


def test_the_number_of_open_files_is_limited(tmp_path, opened):
    paths = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 5000)
    with OpenFiles(2) as files:
        for number in (0, 1, 0, 2, 0, 1):
            assert files.map(paths[number], 4097, 3) == bytes([number]) * 3
            assert len(open_shards(tmp_path)) <= 2
    assert opened == {"0": 1, "1": 2, "2": 1}
    assert open_shards(tmp_path) == []


def test_threads_may_read_at_the_same_time(tmp_path):
    """Threads read like transformers loading a model. Each closes the file that another has just
    opened."""
    names = [str(number) for number in range(8)]
    save_file({name: torch.full((600,), int(name)) for name in names}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda name: checkpoint.read(name).clone(), names * 100))
    assert [int(tensor[-1]) for tensor in read] == [int(name) for name in names * 100]


def test_a_failed_load_leaves_no_file_open(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path)
    monkeypatch.setattr(torch, "frombuffer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(directory, CPU, torch.float32)
    assert open_shards(directory) == []


def test_a_truncated_file_is_reported_by_name(tmp_path):
    (tmp_path / "short").write_bytes(bytes(100))
    with OpenFiles() as files, pytest.raises(OSError, match="short is truncated"):
        files.map(tmp_path / "short", 90, 20)


def test_tensors_of_every_dtype_and_shape_are_read_like_by_safetensors(tmp_path):
    kinds = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64)
    tensors = {str(kind): torch.arange(6).to(kind).view(2, 3) for kind in kinds}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_writing_to_a_loaded_tensor_does_not_change_the_file(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / SINGLE)
    Checkpoint(tmp_path).read("a").zero_()
    assert Checkpoint(tmp_path).read("a").sum() == 4


def test_an_unsupported_dtype_is_reported_by_name(tmp_path):
    save_file({"a": torch.ones(4, dtype=torch.float64)}, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match="a is F64, supported are F32"):
        Checkpoint(tmp_path).read("a")


def test_every_tensor_is_prefetched_before_it_is_read_and_not_all_at_once(tmp_path, monkeypatch):
    directory = make_checkpoint(tmp_path, max_shard_size="100KB")
    tensors = Checkpoint(directory).tensors
    assert len({tensor.path for tensor in tensors.values()}) > 2
    largest = max(tensor.num_bytes for tensor in tensors.values())
    monkeypatch.setattr(weights, "AHEAD_BYTES", largest)
    asked, read, watched = [], [], weights.ReadAhead.reads

    def advise(file, offset, num_bytes, advice):
        asked.append((os.readlink(f"/proc/self/fd/{file}"), offset, num_bytes, advice))

    def reads(self, name):
        watched(self, name)
        read.append(tensors[name].num_bytes)
        wanted = str(tensors[name].path), tensors[name].offset, tensors[name].num_bytes
        assert (*wanted, os.POSIX_FADV_WILLNEED) in asked
        assert sum(num_bytes for *_, num_bytes, _ in asked) < sum(read) + 2 * largest

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(weights.ReadAhead, "reads", reads)
    load(directory, CPU, torch.float32)
    assert len(asked) == len(read) == len(tensors)


def test_the_progress_of_loading_is_logged(tmp_path, monkeypatch, caplog):
    directory = make_checkpoint(tmp_path)
    monkeypatch.setattr(weights, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level("INFO", weights.__name__):
        load(directory, CPU, torch.float32)
    lines = [record.message for record in caplog.records if record.name == weights.__name__]
    shares = [int(line.partition("read=")[2].strip("\"'").split()[0]) for line in lines]
    assert shares == sorted(shares) and 0 < shares[0] < 50 and shares[-1] == 100


def test_a_fast_load_logs_no_progress(tmp_path, caplog):
    directory = make_checkpoint(tmp_path)
    now = 5.0
    told = weights.ReadAhead(Checkpoint(directory).tensors, OpenFiles(), clock=lambda: now)
    with caplog.at_level("INFO", weights.__name__):
        for name in Checkpoint(directory).tensors:
            told.reads(name)
        assert not caplog.records
        now += weights.LOG_INTERVAL_S
        told.reads(name)
    assert "100 %" in caplog.records[0].message


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = make_checkpoint(tmp_path_factory.mktemp("model"), **SIZES)
    path = made / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    return made


@pytest.mark.parametrize(
    "quantize",
    [
        "none",
        pytest.param(
            "int8",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here"),
            ],
        ),
    ],
)
def test_the_peak_of_loading_is_the_reported_size_and_a_little_more(directory, quantize):
    said = open_checkpoint(directory).weight_bytes(LoadTarget(CPU, torch.bfloat16, quantize))
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, directory, quantize],
        capture_output=True,
        text=True,
        check=True,
        timeout=570,
    )
    height, stays = map(int, loaded.stdout.split())
    assert height <= MOST * said + SLACK_BYTES
    assert abs(stays - said) <= 0.05 * said + SLACK_BYTES
