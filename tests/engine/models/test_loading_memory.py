"""Loading needs little more memory at its peak than the loaded weights, whose size is reported
before."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import open_checkpoint
from engine.models.linear import onednn
from engine.models.spec import LoadTarget
from tests.support.models.checkpoints import make_checkpoint

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
    said = open_checkpoint(directory).weight_bytes(
        LoadTarget(torch.device("cpu"), torch.bfloat16, quantize)
    )
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
