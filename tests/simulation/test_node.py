"""A simulated node: its imports, its pools, and the options and requests that it refuses."""

import os
import subprocess
import sys

import numpy as np
import pytest

from common.config import DecodeConfig, PrefillConfig
from common.errors import ConfigError, InvalidRequest, TransferError
from common.page_tables import PageTables
from common.requests.sampling import GuidedDecoding, SamplingParams
from simulation.node.options import check_config
from simulation.node.parts import SimLimits
from simulation.node.pools import SharedPool, open_pool, pool_directory

_WITHOUT_TORCH = """
import sys
for name in ("torch", "triton", "transformers", "nixl", "safetensors"):
    sys.modules[name] = None
import simulation.fleet, prefill_node.engine, decode_node.engine, decode_node.program
import prefill_node.program
"""


def test_simulated_nodes_and_both_roles_need_no_torch():
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True)


def config_of(record, **engine):
    return record.model_validate({"engine": {"model": "llama-3-8b", **engine}})


@pytest.mark.parametrize("record", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize(
    "engine, words",
    [
        ({"quantize": "int8"}, "engine.quantize"),
        ({"lora": {"adapter_dir": "/a"}}, "engine.lora"),
        ({"speculative": {"method": "mtp"}}, "engine.speculative.method"),
        (
            {"offload": {"cpu_bytes": 1, "disk_dir": "/a", "disk_bytes": 1}},
            "engine.offload.disk_dir",
        ),
        ({"device": "sim:tpu"}, "gpu 'tpu' is not supported"),
        ({"model": "gpt-9"}, "model 'gpt-9'"),
        ({"parallel": {"tp": 3}}, "tp 3 is not supported"),
    ],
)
def test_an_option_that_is_not_simulated_is_refused_by_name(record, engine, words):
    check_config(config_of(record, device="sim:h100"))
    with pytest.raises(ConfigError, match=words):
        check_config(config_of(record, **{"device": "sim:h100", **engine}))


@pytest.mark.parametrize("engine", [{"device": "sim:"}, {"sim": {"link": "tcp25"}}])
def test_settings_of_simulated_nodes_need_a_simulated_device(engine):
    with pytest.raises(ValueError, match="sim"):
        config_of(PrefillConfig, **engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"guide": GuidedDecoding("json_object", "")},
        {"hidden_states": True},
    ],
)
def test_a_request_for_a_feature_that_is_not_simulated_is_refused_by_name(fields):
    limits = SimLimits(1024, 1000, PageTables(16), 64)
    limits.check_sampling(SamplingParams(max_tokens=4, seed=1))
    with pytest.raises(InvalidRequest, match=f"sampling.{next(iter(fields))} is not supported"):
        limits.check_sampling(SamplingParams(max_tokens=4, seed=1, **fields))


def test_a_pool_is_read_by_name_until_its_node_ends(tmp_path):
    directory = pool_directory(tmp_path / "pools")
    pool = SharedPool(directory, 8)
    pool.pages[3] = 5
    seen = open_pool(directory, pool.name, 8)
    assert seen[3] == 5
    pool.pages[3] = 6
    assert seen[3] == 6
    with pytest.raises(ValueError, match="read-only"):
        seen[3] = 7
    for name, num_pages in ((b"../x", 8), (pool.name, 9), (b"0" * 16, 8), (b"\0" * 16, 8)):
        with pytest.raises(TransferError):
            open_pool(directory, name, num_pages)
    pool.close()
    with pytest.raises(TransferError, match="one host only"):
        open_pool(directory, pool.name, 8)
    assert not np.any(seen[:3])


def test_pools_of_killed_nodes_are_deleted_and_those_of_others_stay(tmp_path):
    directory = pool_directory(tmp_path / "pools")
    code = (
        "import os, sys; from pathlib import Path; from simulation.node.pools import SharedPool\n"
        "SharedPool(Path(sys.argv[1]), 8); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)
    mine = SharedPool(directory, 8)
    assert len(os.listdir(directory)) == 2
    pool_directory(directory)
    assert os.listdir(directory) == [mine.name.decode()]
    mine.close()


def test_a_directory_that_others_may_read_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        pool_directory(tmp_path / "open")
