"""The processes that `baton up` starts, and their flags."""

import dataclasses
from pathlib import Path

import pytest

from cli.local import plan
from cli.up import options as up_options
from common.config import DecodeConfig, EncodeConfig, PrefillConfig, RouterConfig, TlsConfig
from common.copy_map import NodeShape
from common.errors import ConfigError
from common.settings import read
from tests.support.refusals import refusal

WISH = plan.RequestedSystem(
    models=(plan.RequestedModel("m", plan.RequestedNodes(2), plan.RequestedNodes(1)),),
    host="127.0.0.1",
    port=50050,
    http_port=8000,
    prefill_port=50100,
    decode_port=50200,
    metrics_port=9000,
    device="cpu",
    node_flags=("--engine.cache.page-size=64",),
    router_flags=("--policy=random",),
)
RECORDS = {
    "router": RouterConfig,
    "prefill_node": PrefillConfig,
    "decode_node": DecodeConfig,
    "encode_node": EncodeConfig,
}


def _of(prefill=2, decode=1, *, prefill_ranks=plan.ONE_RANK, decode_ranks=plan.ONE_RANK, **own):
    """Return WISH with these numbers of nodes and fields."""
    dp = own.pop("decode_dp", 1)
    model = plan.RequestedModel(
        "m",
        plan.RequestedNodes(prefill, prefill_ranks),
        plan.RequestedNodes(decode, decode_ranks, dp),
    )
    return dataclasses.replace(WISH, models=(model,), **own)


def _configs(wish):
    """Return the configuration of each process as parsed from its flags, by name."""
    return {
        program.name: read(RECORDS[program.module], program.name, program.flags)
        for program in plan.programs(wish)
    }


def test_every_process_accepts_its_flags():
    configs = _configs(WISH)
    assert list(configs) == ["router", "prefill-0", "prefill-1", "decode-0"]
    ports = [config.server.port for config in configs.values()]
    assert ports == [50050, 50100, 50101, 50200]
    assert configs["router"].http_port == 8000
    assert configs["router"].policy == "random"
    assert [config.server.metrics_port for config in configs.values()] == [9000, 9001, 9002, 9003]
    assert configs["decode-0"].engine.cache.page_size == 64
    assert configs["decode-0"].mode == "disaggregated"


def test_the_router_knows_all_nodes():
    router = _configs(WISH)["router"]
    assert router.prefill == ("127.0.0.1:50100", "127.0.0.1:50101")
    assert router.decode == ("127.0.0.1:50200",)


def test_an_ipv6_address_has_brackets_before_its_port():
    programs = plan.programs(dataclasses.replace(WISH, host="::1"))
    ports = (50050, 50100, 50101, 50200)
    assert [program.address for program in programs] == [f"[::1]:{port}" for port in ports]
    assert _configs(dataclasses.replace(WISH, host="::1"))["router"].decode == ("[::1]:50200",)


def test_encode_nodes_are_last_and_the_router_knows_them():
    model = dataclasses.replace(WISH.models[0], encode=plan.RequestedNodes(2))
    configs = _configs(dataclasses.replace(WISH, models=(model,)))
    assert list(configs)[-2:] == ["encode-0", "encode-1"]
    assert configs["encode-1"].server.port == plan.ENCODE_PORT + 1
    assert configs["encode-1"].engine.cache.page_size == 64  # otherwise it would pair with no node
    assert configs["router"].encode == ("127.0.0.1:50400", "127.0.0.1:50401")


@pytest.mark.parametrize("flags", [["--prefill=0"], ["--device=sim:h100"]])
def test_encode_nodes_need_prefill_nodes_that_compute(flags, capsys):
    arguments = ["--model=llama-3-8b", "--encode=1", *flags]
    assert "--encode" in refusal(capsys, lambda: up_options.parse(arguments))


def test_without_prefill_nodes_decode_nodes_are_colocated():
    configs = _configs(_of(prefill=0))
    assert list(configs) == ["router", "decode-0"]
    assert configs["decode-0"].mode == "colocated"


@pytest.mark.parametrize("prefill, decode, threads", [(1, 1, 8), (0, 2, 4), (2, 1, 4), (1, 16, 1)])
def test_on_a_cpu_the_cores_are_divided_among_the_nodes_of_a_role(
    monkeypatch, prefill, decode, threads
):
    # Seen failing with the cores divided among all nodes, and if every node has all of them.
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    configs = _configs(_of(prefill, decode))
    del configs["router"]
    assert {config.engine.threads for config in configs.values()} == {threads}


@pytest.mark.parametrize("own", [None, "active"])
def test_idle_threads_of_engines_that_share_cores_sleep_at_once(monkeypatch, own):
    # Seen failing if every node has the setting, and if it overwrites the user's.
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    for prefill, expected in ((1, own or "passive"), (0, own)):
        _, *nodes = plan.programs(_of(prefill))
        for node in nodes:
            assert node.environment.get("OMP_WAIT_POLICY") == expected


def test_the_users_own_flag_overrides_the_plans():
    configs = _configs(dataclasses.replace(WISH, node_flags=("--engine.threads=7",)))
    assert configs["prefill-0"].engine.threads == 7


@pytest.mark.parametrize("devices, expected", [(1, ["0", "0", "0"]), (2, ["0", "1", "0"])])
def test_cuda_devices_are_assigned_to_nodes_in_turn(monkeypatch, devices, expected):
    monkeypatch.setattr(plan, "cuda_devices", lambda: devices)
    configs = _configs(dataclasses.replace(WISH, device="auto"))
    used = [configs[name].engine.device for name in ("prefill-0", "prefill-1", "decode-0")]
    assert used == [f"cuda:{number}" for number in expected]


@pytest.mark.parametrize(
    "prefill_tp, decode_tp, devices, expected, fraction",
    [
        (2, 4, 8, ["cuda:0,1", "cuda:2,3", "cuda:4,5,6,7"], 0.9),
        (1, 2, 4, ["cuda:0", "cuda:1", "cuda:2,3"], 0.9),
        (1, 4, 4, ["cuda:0", "cuda:1", "cuda:2,3,0,1"], 0.45),
    ],
)
def test_each_rank_has_a_cuda_device(
    monkeypatch, prefill_tp, decode_tp, devices, expected, fraction
):
    monkeypatch.setattr(plan, "cuda_devices", lambda: devices)
    wish = _of(
        device="auto", prefill_ranks=NodeShape(prefill_tp), decode_ranks=NodeShape(decode_tp)
    )
    configs = _configs(wish)
    engines = [configs[name].engine for name in ("prefill-0", "prefill-1", "decode-0")]
    assert [engine.device for engine in engines] == expected
    assert {engine.cache.memory_fraction for engine in engines} == {fraction}


def test_a_node_with_more_ranks_than_cuda_devices_is_rejected(monkeypatch):
    monkeypatch.setattr(plan, "cuda_devices", lambda: 3)
    with pytest.raises(ConfigError, match=r"of 4 ranks needs as many CUDA devices.* has 3"):
        plan.programs(_of(device="auto", decode_ranks=NodeShape(4)))


def test_cuda_without_a_device_is_rejected(monkeypatch):
    monkeypatch.setattr(plan, "cuda_devices", lambda: 0)
    with pytest.raises(ConfigError, match="no CUDA device"):
        plan.programs(dataclasses.replace(WISH, device="cuda"))


def test_tls_is_used_everywhere_and_clients_need_no_certificate():
    files = {"cert": Path("c"), "key": Path("k"), "ca": Path("a"), "server_name": "name"}
    configs = _configs(dataclasses.replace(WISH, tls=TlsConfig(**files)))
    router = configs.pop("router")
    assert router.server.tls == TlsConfig(cert="c", key="k")
    assert router.tls_to_nodes == TlsConfig(**files)
    assert {config.server.tls for config in configs.values()} == {TlsConfig(**files)}


def test_nodes_of_a_group_share_a_directory_and_have_their_own_ranks(tmp_path):
    wish = _of(1, 2, decode_dp=2, groups=tmp_path)
    configs = _configs(wish)
    nodes = [configs[f"decode-{number}"].engine.parallel for number in range(4)]
    assert [node.dp for node in nodes] == [2] * 4
    assert [node.dp_rank for node in nodes] == [0, 1, 0, 1]
    assert [node.dp_group for node in nodes] == [
        tmp_path / f"decode-{group}" for group in (0, 0, 1, 1)
    ]
    assert configs["prefill-0"].engine.parallel.dp == 1
    router = configs["router"]
    assert len(router.prefill) == 1 and len(router.decode) == 4


def test_all_nodes_have_the_draft_model():
    """Flags of the user are last, so they override others."""
    _, flags = up_options.parse(
        ["--draft-model=D", "--engine.speculative.num-speculative-tokens=3"]
    )
    configs = _configs(dataclasses.replace(WISH, node_flags=tuple(flags)))
    nodes = [config.engine.speculative for name, config in configs.items() if name != "router"]
    assert len(nodes) == 3
    for each in nodes:
        assert (each.method, each.draft_model, each.num_speculative_tokens) == (
            "draft_model",
            "D",
            3,
        )


def test_several_models_have_their_own_nodes_and_one_router(tmp_path):
    models = (
        plan.RequestedModel("m", plan.RequestedNodes(1), plan.RequestedNodes(2, dp=2), "big"),
        plan.RequestedModel("n", plan.RequestedNodes(0), plan.RequestedNodes(1)),
    )
    configs = _configs(dataclasses.replace(WISH, models=models, groups=tmp_path))
    big, small = configs["router"].models
    assert (big.name, big.model, big.prefill) == ("big", "m", ("127.0.0.1:50100",))
    assert big.decode == tuple(f"127.0.0.1:{port}" for port in range(50200, 50204))
    assert (small.name, small.prefill, small.decode) == ("n", (), ("127.0.0.1:50204",))
    assert [config.engine.model for name, config in configs.items() if name != "router"] == [
        *["m"] * 5,
        "n",
    ]
    groups = [configs[f"decode-{number}"].engine.parallel.dp_group for number in range(4)]
    assert groups == [tmp_path / f"decode-{group}" for group in (0, 0, 1, 1)]
    assert configs["decode-4"].mode == "colocated"
    assert configs["decode-0"].mode == "disaggregated"
    router = plan.programs(dataclasses.replace(WISH, models=models))[0]
    assert router.services == ["baton.v1.Router", "baton.v1.Router/big", "baton.v1.Router/n"]


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--model=a"], [("a", 1, 1)]),
        (["--model=a", "--model=b"], [("a", 1, 1), ("b", 1, 1)]),
        (
            ["--model=a", "--model=b", "--decode=2", "--decode=1", "--prefill=0"],
            [("a", 0, 2), ("b", 0, 1)],
        ),
    ],
)
def test_counts_of_up_are_for_all_models_or_in_their_order(flags, expected):
    options, _ = up_options.parse(flags)
    found = [(each.name, each.prefill.count, each.decode.count) for each in options.models]
    assert found == expected


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model=a", "--model=a"], "2 models are called 'a'"),
        (["--model=a", "--model=b", *["--decode=1"] * 3], "--decode: 3 values for 2 models"),
        ([f"--model={number}" for number in range(17)], "17 times --model: at most 16"),
        (["--model=a", "--model=b", "--prefill=0", "--decode=0", "--decode=1"], "one of them 1"),
    ],
)
def test_wrong_models_of_up_are_rejected(flags, words, capsys):
    assert words in refusal(capsys, lambda: up_options.parse(flags))
