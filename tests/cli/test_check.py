"""`baton check` reports whether a configuration would run on this machine."""

import json
import os
import re
import socket
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cli.check.__main__ import PROGRAM, main
from cli.demo_model import write
from common.identity.secret import new_secret
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.quantized_checkpoints import FORMATS, requantised
from tests.support.models.tiny_models import make_tiny, tiny_config
from tests.support.network.certificates import Authority
from tests.support.processes import fork_server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo") / "model"
    write(directory)
    return directory


@pytest.fixture
def check(capsys, monkeypatch):
    """Run the command in this process, which has loaded the modules of a node. Loading takes
    seconds."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [PROGRAM, *arguments])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_demo_model_runs_on_this_machine(model):
    flags = (f"--model={model}", "--device=cpu", "--port=0")
    wide = {**os.environ, "COLUMNS": "200"}
    done = fork_server.run("cli.check", *flags, environment=wide)
    assert (done.returncode, done.stderr) == (0, "")
    assert "qwen3" in done.stdout
    assert "fails" not in done.stdout


def test_json_has_the_findings_and_help_has_the_commands_flags(check, model):
    code, text, _ = check(f"--model={model}", "--device=cpu", "--port=0", "--json")
    assert code == 0
    assert {finding["verdict"] for finding in json.loads(text)} <= {"ok", "note"}
    code, text, _ = check("--role=router", "--help")
    assert code == 0 and "--role" in text and "--policy" in text


def test_the_report_has_the_authentication_of_callers(check, model, tmp_path):
    base = (f"--model={model}", "--device=cpu", "--port=0")
    code, table, _ = check(*base, "--host=0.0.0.0")
    assert code == 1 and "is reachable from other hosts" in table
    secret = tmp_path / "secret"
    secret.write_text(new_secret())
    code, table, _ = check(*base, "--host=0.0.0.0", f"--secret-file={secret}")
    assert code == 0 and "by the cluster secret" in table


def test_a_router_that_authenticates_only_nodes_has_unauthenticated_callers(check, model, tmp_path):
    tls = Authority().write(tmp_path)
    base = ("--role=router", f"--model={model}", "--decode=a:1", "--port=0", "--http-port=0")
    checks = (*base, "--host=0.0.0.0", f"--node-tls.ca={tls.ca}")
    code, table, _ = check(*checks)
    assert code == 1 and "is reachable from other hosts" in table
    code, table, _ = check(*checks, f"--node-tls.cert={tls.cert}", f"--node-tls.key={tls.key}")
    assert code == 0 and "by their certificates" in table


def test_check_starts_no_process_and_leaves_the_port_free(check, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, table, _ = check(f"--model={model}", "--device=cpu", f"--port={port}")
    assert code == 1
    assert f"port {port}" in table


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--engine.cache.num-pages=100000000"], "100000000 pages"),
        (["--device=cuda:99"], "cuda:99"),
        (["--engine.parallel.tp=2", "--engine.parallel.collectives=nccl"], "nccl is for"),
        (["--engine.context-length=9000"], "9000"),
    ],
)
def test_requirements_that_the_machine_or_the_model_cannot_meet_fail(check, model, flags, words):
    code, table, _ = check(f"--model={model}", "--device=cpu", "--port=0", *flags)
    assert code == 1
    assert words in table


def test_the_memory_of_a_draft_model_is_included(check, model, tmp_path):
    base = (f"--model={model}", "--device=cpu", "--port=0", "--json")
    method = "--engine.speculative.method=draft_model"
    reported = []
    for flags in ((), (method, f"--engine.speculative.draft-model={model}")):
        code, text, _ = check(*base, *flags)
        assert code == 0
        reported.append({finding["what"]: finding["remark"] for finding in json.loads(text)})
    assert (
        f"from a draft model: {model}, whose KV has 4 layers x 2 heads x 32"
        in reported[1]["drafts"]
    )
    assert reported[0]["memory"] != reported[1]["memory"]
    other = make_checkpoint(tmp_path / "other", "llama")
    code, table, _ = check(*base[:3], method, f"--engine.speculative.draft-model={other}")
    assert code == 1 and "320 tokens" in table


def test_an_unsupported_architecture_names_the_supported_ones(check, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    code, table, _ = check(f"--model={tmp_path}", "--port=0", "--model-backend=native")
    assert code == 1
    for name in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        assert name in table


def test_the_report_has_the_stored_and_the_used_format_of_weights(check, model, tmp_path):
    quantised, _ = requantised(model, tmp_path, FORMATS["awq"])
    for served, words in (
        (model, "not quantized, as stored"),
        (quantised, "AWQ int4, groups of 32, as stored"),
    ):
        code, table, _ = check(f"--model={served}", "--device=cpu", "--port=0")
        assert code == 0 and words in table
    without = "--engine.cpu-kernels=off"
    code, table, _ = check(f"--model={quantised}", "--device=cpu", "--port=0", without)
    assert code == 0 and "AWQ int4, groups of 32, converted to floats when loaded" in table


def test_an_encode_node_is_checked_without_the_decoder(check, model, tmp_path):
    pytest.importorskip("PIL")
    from tests.support.models.vision import make_vision_checkpoint

    directory = make_vision_checkpoint(tmp_path / "vision")
    base = ("--role=encode", "--device=cpu", "--port=0")
    code, table, _ = check(*base, f"--model={directory}", "--embedding-bytes=8388608")
    assert code == 0 and "encode node" in table and "qwen2_5_vl" in table
    assert re.search(r"8\.\d* MiB of pages", table), table
    assert "compiled operations" not in table  # which belong to the decoder
    code, table, _ = check(*base, f"--model={model}")
    assert code == 1 and "no image encoder" in table
    code, table, _ = check(*base, f"--model={directory}", "--embedding-bytes=1")
    assert code == 1 and "less than a page" in table
    code, table, _ = check(*base, f"--model={directory}", "--engine.parallel.tp=2")
    assert code == 1 and "not supported on encode nodes" in table


def test_the_report_has_the_backend_of_a_model_and_the_reason(check, model, tmp_path):
    _, table, _ = check(f"--model={model}", "--device=cpu", "--port=0")
    assert "natively" in table
    code, table, _ = check(f"--model={make_tiny(tmp_path, 'gpt2')}", "--device=cpu", "--port=0")
    assert code == 0
    assert "by transformers' GPT2LMHeadModel, gpt2 has no native implementation" in " ".join(
        table.split()
    )


def test_an_unsupported_class_is_reported_with_its_reason(check, tmp_path):
    tiny_config("mamba").save_pretrained(tmp_path)
    code, table, _ = check(f"--model={tmp_path}", "--device=cpu", "--port=0")
    assert code == 1
    assert "mamba is not supported: layer types linear_attention" in " ".join(table.split())


def test_an_invalid_configuration_is_one_line_and_code_2(check, model):
    code, table, errors = check(f"--model={model}", "--engine.cache.page-size=3")
    assert (code, table) == (2, "")
    assert len(errors.splitlines()) == 1


def test_a_router_needs_a_decode_node(check, model):
    code, table, _ = check("--role=router", f"--model={model}", "--port=0")
    assert code == 1
    assert "--decode" in table


def test_the_report_has_the_subject_and_the_end_of_a_certificate(check, model, tmp_path):
    end = datetime(2101, 1, 1, tzinfo=UTC)
    config = Authority().write(tmp_path, "baton-node", not_after=end, roles=["node"])
    common = (f"--model={model}", "--port=0", f"--tls-cert={config.cert}", "--device=cpu")
    node = (*common, f"--tls-ca={config.ca}")
    code, table, _ = check(*node, f"--tls-key={config.key}")
    assert code == 0
    assert "mutual: baton-node, urn:baton:node, until 2101-01-01" in table
    code, table, _ = check(*node, f"--tls-key={config.cert}")
    assert code == 1
    assert "holds no PEM private key" in table


def test_a_router_with_tls_that_calls_nodes_without_is_reported(check, model, tmp_path):
    soon = datetime.now(UTC) + timedelta(days=3)
    config = Authority().write(tmp_path, not_after=soon, roles=())
    router = ("--role=router", f"--model={model}", "--port=0", "--http-port=0", "--decode=a:1")
    router += (f"--tls-cert={config.cert}", f"--tls-key={config.key}")
    code, table, _ = check(*router)
    assert code == 0
    assert re.search("TLS to nodes .* note .* off", table)
    assert re.search("TLS .* note .* on: localhost, 127.0.0.1, until", table)
    code, table, _ = check(*router, f"--node-tls.ca={config.ca}")
    assert "off" not in table


# Ranks ------------------------------------------------------------------------------------------


@pytest.fixture
def check_pair(check, model, tmp_path):
    """Return the exit code and the JSON for a prefill node and a decode node with these
    settings."""

    def run(prefill, decode, *flags, served=model):
        files = []
        for name, settings in (("prefill", prefill), ("decode", decode)):
            files.append(tmp_path / f"{name}.yaml")
            files[-1].write_text(json.dumps(settings))  # JSON is YAML
        named = [f"--model={served}"] if served else []
        code, text, errors = check(
            *map(str, files), *named, "--device=cpu", "--port=0", "--json", *flags
        )
        assert errors == ""
        return code, json.loads(text)

    return run


def ranks(tp, **engine):
    return {"engine": {"parallel": {"tp": tp}, **engine}}


def remarks(findings, verdict):
    return [each["remark"] for each in findings if each["verdict"] == verdict]


def spans(pair):
    """Return all reads: both ranks, and the first byte in both pages."""
    return [
        (each["rank"], each["producer_rank"], each["source"], each["at"]) for each in pair["reads"]
    ]


def test_the_memory_of_a_node_with_ranks_is_reported_for_each(check, model):
    flags = (f"--model={model}", "--device=cpu", "--port=0", "--json")
    one, two = (json.loads(check(*flags, f"--engine.parallel.tp={tp}")[1]) for tp in (1, 2))
    assert not [finding for finding in one if finding["what"] == "ranks"]
    (reported,) = [finding["remark"] for finding in two if finding["what"] == "ranks"]
    assert re.match(r"ranks 0 to 1, each: \S+ MiB of weights, pages of \d+ bytes, ", reported)
    (memory,) = [finding["remark"] for finding in two if finding["what"] == "memory"]
    assert memory.startswith("each rank: ")
    free = [float(re.search(r"in (\S+) GiB", str(found))[1]) for found in (one, two)]
    # other processes use memory at the same time
    assert free[0] / 2 == pytest.approx(free[1], rel=0.3)
    (device,) = [finding["remark"] for finding in two if finding["what"] == "device"]
    assert device.endswith("threads for each rank")


def test_a_node_of_a_group_is_checked_with_its_part_of_the_experts(check, model, tmp_path):
    group = ("--engine.parallel.dp=2", f"--engine.parallel.dp-group={tmp_path / 'group'}")
    moe = make_checkpoint(tmp_path / "model", "qwen3_moe")
    code, out, _ = check(f"--model={moe}", "--device=cpu", "--port=0", *group)
    assert code == 0, out
    code, out, _ = check(f"--model={model}", "--device=cpu", "--port=0", *group)
    assert code == 1 and "engine.parallel.dp: the model has no experts" in out


def test_replicas_of_experts_are_checked_with_their_numbers(check, tmp_path):
    flags = (f"--model={make_checkpoint(tmp_path, 'qwen3_moe')}", "--device=cpu", "--port=0")
    ranks = ("--engine.parallel.tp=2", "--engine.parallel.experts=ep")
    code, out, _ = check(*flags, *ranks, "--engine.parallel.redundant-experts=2")
    assert code == 0, out
    code, out, _ = check(*flags, *ranks, "--engine.parallel.redundant-experts=1", "--json")
    assert code == 1 and "8 experts and 1 replicas cannot have equal numbers of slots" in out


def test_each_rank_of_a_consumer_reads_its_heads_of_a_page(check_pair):
    code, found = check_pair(ranks(1), ranks(2))
    assert code == 0
    pair = found["pair"]
    (whole,), (first, second) = pair["ranks"]["prefill"], pair["ranks"]["decode"]
    assert first == second
    for each in ("page_bytes", "token_bytes"):
        assert 2 * first[each] == whole[each]
    assert whole["weight_bytes"] / 2 <= first["weight_bytes"] < whole["weight_bytes"]
    half = first["page_bytes"]
    assert spans(pair) == [(0, 0, 0, 0), (1, 0, half, 0)]
    assert {(each["table"], each["size"]) for each in pair["reads"]} == {("table 0", half)}

    code, found = check_pair(ranks(2), ranks(1))
    assert code == 0 and spans(found["pair"]) == [(0, 0, 0, 0), (0, 1, 0, half)]


def test_with_equal_numbers_of_ranks_each_reads_from_one(check_pair):
    code, found = check_pair(ranks(4), ranks(4))  # twice as many as KV heads
    assert code == 0
    assert spans(found["pair"]) == [(rank, rank, 0, 0) for rank in range(4)]


def test_the_state_of_a_request_is_listed_in_parts(check, check_pair, tmp_path):
    served = make_checkpoint(tmp_path / "hybrid", "qwen3_next")
    code, found = check_pair(ranks(1), ranks(2), "--engine.cache.page-size=256", served=served)
    assert code == 0
    states = [each for each in found["pair"]["reads"] if each["table"] == "state"]
    assert {each["rank"] for each in states} == {0, 1}
    assert len({(each["source_page"], each["source"]) for each in states}) == len(states)
    equal = check_pair(ranks(2), ranks(2), "--engine.cache.page-size=256", served=served)[1]["pair"]
    page_bytes = equal["ranks"]["decode"][0]["page_bytes"]
    assert {each["size"] for each in equal["reads"]} == {page_bytes}  # whole pages
    files = (str(tmp_path / "prefill.yaml"), str(tmp_path / "decode.yaml"))
    Path(files[0]).write_text(json.dumps(ranks(1)))
    code, text, _ = check(
        *files, f"--model={served}", "--device=cpu", "--port=0", "--engine.cache.page-size=256"
    )
    assert code == 0
    assert len(re.findall(r"state +│ \d+ parts of \d+ pages", text)) == 2


def test_a_model_that_the_ranks_cannot_split_is_reported_with_numbers(check, check_pair, tmp_path):
    code, found = check_pair(ranks(1), ranks(3))
    assert code == 1
    expected = "engine.parallel.tp 3: 3 ranks cannot have equal parts of 2 KV heads"
    for findings in (found["decode"], found["pair"]["findings"]):
        (reported,) = remarks(findings, "fails")
        assert reported.startswith(expected)
    assert not remarks(found["prefill"], "fails") and not found["pair"]["reads"]
    cells = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    served = make_checkpoint(tmp_path / "hybrid", "qwen3_next", **cells)
    code, found = check_pair(ranks(1), ranks(2), "--engine.cache.page-size=32", served=served)
    assert code == 1 and not remarks(found["prefill"], "fails")
    (reported,) = remarks(found["decode"], "fails")
    assert re.search(r"page_size: 32 tokens make pages of 8192 bytes, .*; 64 are enough", reported)


@pytest.mark.parametrize(
    "decode, reported",
    [
        (ranks(2, cache={"page_size": 32}), "page_size is '32' here and '16' there"),
        (ranks(2, cache={"dtype": "fp8_e4m3"}), "kv_dtype is 'float8_e4m3fn' here"),
        ({**ranks(2), "mode": "colocated"}, "mode colocated reads from no prefill node"),
        ({**ranks(2), "transfer": {"backend": "tcp"}}, "the prefill node has only nixl"),
    ],
)
def test_nodes_that_cannot_pair_are_reported_with_the_reason(check_pair, decode, reported):
    prefill = {**ranks(1), "transfer": {"backend": "nixl" if "transfer" in decode else "auto"}}
    code, found = check_pair(prefill, decode)
    assert code == 1
    assert any(reported in remark for remark in remarks(found["pair"]["findings"], "fails"))


def test_nodes_with_other_weights_cannot_pair(check_pair, tmp_path):
    models = [str(make_checkpoint(tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    code, found = check_pair(*(ranks(1, model=model) for model in models), served=None)
    assert code == 1
    (reported,) = remarks(found["pair"]["findings"], "fails")
    assert "weights is" in reported and "dtype" not in reported


def test_a_pair_needs_two_files(check, model, tmp_path):
    (tmp_path / "a.yaml").write_text("")
    file = str(tmp_path / "a.yaml")
    code, _, errors = check(file, f"--model={model}")
    assert code == 2 and "expected two files" in errors
    code, _, errors = check(file, file, f"--model={model}", f"--config={file}")
    assert code == 2 and "--config" in errors


def test_each_stage_has_its_layers_and_those_are_read(check_pair, tmp_path):
    served = make_checkpoint(tmp_path / "odd", num_hidden_layers=5)
    stages = {"engine": {"parallel": {"tp": 1, "pp": 2}}}
    code, found = check_pair(stages, ranks(1), served=served)
    assert code == 0
    (first, last), (whole,) = (found["pair"]["ranks"][role] for role in ("prefill", "decode"))
    assert [each["page_bytes"] * 5 // whole["page_bytes"] for each in (first, last)] == [2, 3]
    assert first["weight_bytes"] + last["weight_bytes"] == whole["weight_bytes"]
    assert {each["producer_rank"]: each["size"] for each in found["pair"]["reads"]} == {
        0: 2 * whole["page_bytes"] // 5 // 2,
        1: 3 * whole["page_bytes"] // 5 // 2,
    }
    assert len(found["pair"]["reads"]) == 4  # of each of 2 KV heads


def test_several_tables_of_pages_need_equal_stages(check_pair, tmp_path):
    served = make_checkpoint(tmp_path / "windows", "gemma2", num_hidden_layers=4)
    stages = {"engine": {"parallel": {"pp": 2}}}
    code, found = check_pair(stages, ranks(1), served=served)
    assert code == 1
    (reported,) = remarks(found["pair"]["findings"], "fails")
    assert "different stages need a model with one table of pages" in reported
    assert check_pair(stages, stages, served=served)[0] == 0
