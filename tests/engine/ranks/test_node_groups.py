"""Nodes that share the experts of a model respond like one node with all of them."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pydantic import ValidationError

from common.config import EngineConfig, ParallelConfig, SpeculativeConfig
from common.errors import ConfigError, EngineFault, FailedPrecondition
from common.requests.namespace import UNNAMED
from common.requests.sampling import SamplingParams
from engine.load import check_group
from engine.models import open_checkpoint
from engine.models.linear import onednn
from engine.models.spec import LoadTarget
from engine.ranks import Share
from engine.ranks.expert_exchange import ExpertExchange
from engine.scheduler.next_rows import MAX_PASSES
from node.control.operations import EngineOperations
from node.messages import PrepareWeights, PutWeights, ReleaseMemory, TakeWeights
from tests.engine.ranks.test_ranks_as_processes import Serving
from tests.support.engine.group_nodes import GroupNode, running
from tests.support.engine.scheduler_role import EVERY_SAMPLING, config_of, prompt, sampled
from tests.support.engine.thread_ranks import run_ranks
from tests.support.hardware.devices import CPU
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.tiny_models import make_tiny
from tests.support.specs import make_request

Requests = Sequence[tuple[list[int], SamplingParams]]


def asks(length: int, seed: int, **sampling: Any) -> tuple[list[int], SamplingParams]:
    """Return a prompt, whose chunks have 32 tokens, and its sampling."""
    return prompt(length, seed), sampled(**sampling)


def answers_of_one(config: EngineConfig, requests: Requests) -> dict[int, list[int]]:
    with contextlib.closing(Serving(config)) as serving:
        for tokens, sampling in requests:
            serving.add(tokens, sampling=sampling)
        serving.run()
        return dict(serving.answers)


def submit(node: GroupNode, requests: Requests) -> None:
    node.submit(
        *(
            make_request(tokens, key=key, sampling=sampling)
            for key, (tokens, sampling) in enumerate(requests, start=1)
        )
    )


EVERY: Requests = [(prompt(5 + 16 * n, n), each) for n, each in enumerate(EVERY_SAMPLING)]
BUSY: Sequence[Requests] = (EVERY, [asks(90, 20), asks(40, 21), asks(3, 22)])
ONE_IDLE: Sequence[Requests] = ((), [asks(70, 3), asks(9, 4)])
int8 = pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
NGRAM = SpeculativeConfig(
    method="ngram", adaptive=False, num_speculative_tokens=3, prompt_lookup_min=1
)


@pytest.mark.parametrize(
    ("architecture", "size", "requests", "fields"),
    [
        ("qwen3_moe", 2, BUSY, {}),
        ("qwen3_moe", 2, ONE_IDLE, {}),
        pytest.param("qwen3_moe", 4, (*BUSY, *ONE_IDLE), {}, marks=pytest.mark.long),
        pytest.param("qwen3_moe", 2, BUSY, {"quantize": "int8"}, marks=[pytest.mark.long, int8]),
        pytest.param("qwen3_moe", 2, BUSY, {"speculative": NGRAM}, marks=pytest.mark.long),
        pytest.param("qwen2_moe", 2, BUSY, {}, marks=pytest.mark.long),
        pytest.param("gpt_oss", 2, BUSY, {"num_pages": 60}, marks=pytest.mark.long),
        pytest.param("deepseek_v3", 3, (*BUSY, ()), {}, marks=pytest.mark.long),
        pytest.param("deepseek_v2", 2, BUSY, {}, marks=pytest.mark.long),
        pytest.param("qwen3_5_moe_text", 2, BUSY, {"num_pages": 60}, marks=pytest.mark.long),
    ],
)
def test_a_group_has_the_responses_of_one_node(
    architecture: str,
    size: int,
    requests: Sequence[Requests],
    fields: dict[str, Any],
    tmp_path: Path,
) -> None:
    model = str(make_checkpoint(tmp_path / "model", architecture))
    config = config_of(1, model=model, **fields)
    expected = [answers_of_one(config, of_node) for of_node in requests]
    with running(size, tmp_path / "group", lambda: config) as nodes:
        for node, of_node in zip(nodes, requests, strict=True):
            submit(node, of_node)
        for node in nodes:
            node.wait()
        assert [dict(node.answers) for node in nodes] == expected
        idle = [node.group.lockstep.idle_batches for node in nodes]
        assert all(count for count, of_node in zip(idle, requests, strict=True) if not of_node)


def test_a_node_computes_prompts_while_another_decodes_and_another_sleeps(tmp_path: Path) -> None:
    """The first node decodes all the time. The group falls asleep, and each node wakes it."""
    config = config_of(1, model=str(make_checkpoint(tmp_path / "model", "qwen3_moe")))
    long, short = [asks(5, 1, max_tokens=100, ignore_eos=True)], [asks(70, 2), asks(33, 3)]
    expected = {id(each): answers_of_one(config, each) for each in (long, short)}
    with running(2, tmp_path / "group", lambda: config) as nodes:
        for first, second in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
            for node in nodes:
                assert node.is_asleep.wait(60)
                node.answers.clear()
            submit(first, long)
            submit(second, short)
            for node, requests in ((first, long), (second, short)):
                node.wait()
                assert dict(node.answers) == expected[id(requests)]


def test_delayed_prompts_have_the_same_responses(tmp_path: Path) -> None:
    config = config_of(1, model=str(make_checkpoint(tmp_path / "model", "qwen3_moe")))
    steps = config.scheduler.model_copy(update={"prefill_delayer": True})
    delaying = config.model_copy(update={"scheduler": steps})
    requests = [asks(5, 1, max_tokens=100, ignore_eos=True)], [asks(70, 2)]
    expected = [answers_of_one(config, each) for each in requests]
    with running(2, tmp_path / "group", lambda: delaying) as (first, second):
        submit(first, requests[0])
        assert first.has_token.wait(60)
        submit(second, requests[1])
        for node in (first, second):
            node.wait()
        assert [dict(first.answers), dict(second.answers)] == expected
        delayed = [node.group.lockstep.delayed_prefills for node in (first, second)]
        assert delayed[0] == 0 < delayed[1] <= MAX_PASSES + 1


def test_a_node_has_its_part_of_the_experts_and_all_other_weights(tmp_path: Path) -> None:
    loadable = open_checkpoint(make_checkpoint(tmp_path, "qwen3_moe"))
    shares = [Share(exchange=ExpertExchange(node, 4)) for node in range(4)]
    whole = loadable.weight_bytes(LoadTarget(CPU, torch.float32))
    parts = [loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=share)) for share in shares]
    experts = 2 * 8 * 3 * 64 * 48 * 4  # layers, experts, matrices, hidden, inner, bytes
    assert parts == [whole - experts + experts // 4] * 4


def test_experts_that_nodes_cannot_divide_are_refused(tmp_path: Path) -> None:
    loadable = open_checkpoint(make_checkpoint(tmp_path, "qwen3_moe"))
    with pytest.raises(ConfigError, match=r"dp: 3 nodes cannot have equal parts of 8 experts"):
        loadable.weight_bytes(
            LoadTarget(CPU, torch.float32, share=Share(exchange=ExpertExchange(0, 3)))
        )


@pytest.mark.parametrize(
    ("make", "backend", "size", "reason"),
    [
        (
            lambda root: make_checkpoint(root, "qwen3_moe"),
            "auto",
            3,
            "3 nodes cannot have equal parts of 8 experts",
        ),
        (lambda root: make_checkpoint(root, "qwen3"), "auto", 2, "the model has no experts"),
        (
            lambda root: make_tiny(root, "olmoe"),
            "transformers",
            2,
            "Olmoe.* runs on the Transformers library",
        ),
    ],
)
def test_models_that_nodes_cannot_share_are_rejected(
    make: Any, backend: Any, size: int, reason: str, tmp_path: Path
) -> None:
    loadable = open_checkpoint(make(tmp_path), backend)
    with pytest.raises(ConfigError, match=rf"engine\.parallel\.dp: .*{reason}"):
        loadable.weight_bytes(
            LoadTarget(CPU, torch.float32, share=Share(exchange=ExpertExchange(0, size)))
        )


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"parallel": {"collectives": "gloo"}}, r"parallel\.collectives: gloo"),
        ({"speculative": SpeculativeConfig(method="mtp")}, r"speculative\.method: mtp"),
        ({"weights_dir": "w"}, "weights_dir"),
    ],
)
def test_settings_that_a_group_does_not_support_are_rejected(
    fields: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{setting} is not supported with .*dp"):
        check_group(config_of(1, model="m", **fields), CPU)
    with pytest.raises(ConfigError, match=r"engine\.device: cuda:0 is not supported"):
        check_group(config_of(1, model="m"), torch.device("cuda:0"))


def test_counts_of_another_step_are_an_error() -> None:
    def gather(share: Share) -> str:
        exchange = ExpertExchange(share.rank, 2, share.group)
        exchange.begin([1, 0])
        rows = 1 - share.rank
        x, ids = torch.ones(rows, 4), torch.zeros(rows, 2, dtype=torch.int32)
        exchange.gather(x, ids.float(), ids)
        with pytest.raises(EngineFault, match=r"has 5 tokens in a step, and has announced"):
            exchange.gather(torch.ones(5, 4), torch.ones(5, 2), torch.ones(5, 2).int())
        return "gathered"

    assert run_ranks(2, gather) == ["gathered"] * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dp": 2}, "dp_group and a dp of 2 or more must be set together"),
        ({"dp_group": "g"}, "must be set together"),
        ({"dp": 2, "dp_group": "g", "dp_rank": 2}, "dp_rank 2 must be less than dp"),
        ({"dp": 2, "dp_group": "g", "tp": 2}, "not supported together with tp or pp"),
    ],
)
def test_impossible_groups_are_rejected(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ParallelConfig(**fields)


def test_weights_and_memory_of_a_node_in_a_group_stay_in_place() -> None:
    part, role = MagicMock(), MagicMock()
    operations = EngineOperations(part, part, part, part, why_fixed="in a group")
    for command in (
        PrepareWeights("w"),
        PutWeights(UNNAMED),
        TakeWeights(UNNAMED, "a:1"),
        ReleaseMemory(("weights",)),
    ):
        with pytest.raises(FailedPrecondition, match="in a group"):
            list(operations.steps(command, role))
