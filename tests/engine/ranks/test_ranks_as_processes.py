"""Engines with several ranks, as processes, generate the tokens of engines with one rank."""

import contextlib
import multiprocessing
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from common import logs
from common.config import (
    EngineConfig,
    OffloadConfig,
    RoutedExpertsConfig,
)
from common.errors import ConfigError, InvalidRequest
from common.process.polling import poll_ready
from engine.adapters.stored import WEIGHTS
from engine.batch.batch import PageCopies
from engine.build import Engine, build
from engine.follower import FollowerStream
from engine.loop.loop import EventLoop
from engine.loop.rebalancing import RebalancingRole
from engine.offload.page_records import HEADER_BYTES, RECORD_BYTES, packed, unpacked
from engine.ranks import processes
from engine.ranks.job_queue import JobFailed
from engine.ranks.messages import CopyPages, DropAdapter, ReadAdapter
from engine.ranks.processes import Followers, PingTimer
from engine.runner.stream import WorkerStream
from tests.engine.offload.test_files_of_an_engine import bring_four_pages, poll_until
from tests.support.engine.measuring_follower import FREE_BYTES
from tests.support.engine.scheduler_role import (
    EVERY_SAMPLING,
    NUM_PAGES,
    Make,
    SchedulerRole,
    adapted,
    config_of,
    drafted,
    given,
    plain,
    prompt,
    sampled,
    serve_adapters,
    serve_given,
    serve_text,
)
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.drafters import make_hybrid_mtp, make_mtp
from tests.support.models.tiny_models import make_tiny
from tests.support.models.vision import SQUARE, make_vision_checkpoint, picture, with_images
from tests.support.processes import fork_server

FOLLOWER = "node.follower"
PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def forked_followers() -> Iterator[None]:
    with fork_server.in_use(processes):
        yield


class Serving(SchedulerRole):
    """A role that has only a scheduler, and collects the results of its requests."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.experts: dict[tuple[int, str], bytes] = defaultdict(bytes)  # of prompts and of tokens
        self.retracted = 0
        self._drive(build(config, FOLLOWER), config)

    def _drive(self, engine: Engine, config: EngineConfig) -> None:
        self.use(engine, config)
        balancer = engine.balancer
        role = self if balancer is None else RebalancingRole(self, balancer)
        self.loop = EventLoop(role, engine.runner)

    @property
    def followers(self) -> Followers:
        followers = self.engine.loaded.followers
        assert followers is not None
        return followers

    def equip(self, config: EngineConfig) -> None:
        """Equip the engine for another role."""
        self._drive(self.engine.equipped(config), config)
        self.engine.equip_followers()

    def next_batch(self) -> Any:
        batch = super().next_batch()
        self.retracted += batch is not None and batch.swap_out is not None
        return batch

    def finish(self, batch: Any, result: Any) -> None:
        outcome = super().finish(batch, result)
        for chunk in outcome.chunks:
            if chunk.prompt_logprobs is not None:
                self.experts[chunk.request.key, "prompt"] += chunk.prompt_logprobs.routed_experts
        for (_, number), logprobs in outcome.logprobs:
            self.experts[number, "tokens"] += logprobs.routed_experts

    def answer(self, length: int) -> list[int]:
        """Return the tokens after a prompt of this length."""
        self.add(prompt(length), sampling=sampled())
        self.run()
        return self.answers[self.added]

    def close(self) -> None:
        self.engine.close()


def serve_and_retract(serving: Serving) -> None:
    serve_text(serving, pooled=True)
    assert serving.retracted


def serve_two(serving: Serving) -> None:
    for number in range(2):
        serving.add(
            prompt(20 + 30 * number, number),
            sampling=sampled(max_tokens=20, temperature=0.9 * number),
        )
    serving.run()


def serve_again(serving: Serving) -> None:
    """Serve requests that continue from the prefix cache."""
    serve_and_retract(serving)
    serve_and_retract(serving)


def serve_images(serving: Serving, rows: int = 3, columns: int = 5) -> None:
    for number in range(2):
        tokens, images = with_images("see " * 12, picture(rows, columns, number), " and then")
        serving.add(tokens, images=images, sampling=EVERY_SAMPLING[number])
    serving.add(prompt(20), sampling=sampled())
    serving.run()


def answers(config: EngineConfig, serve: Any) -> dict[int, list[int]]:
    with contextlib.closing(Serving(config)) as serving:
        serve(serving)
        return serving.answers


def serve_and_load_adapters(serving: Serving) -> None:
    """Serve more adapters than slots, one of which is loaded late and one twice."""
    loads = {
        name: serving.engine.loader.load(name, path) for name, path in (("d", "a"), ("c", "c"))
    }
    while not all(load.done() for load in loads.values()):
        serving.engine.loader.poll()
    serve_adapters(serving)
    serving.add(prompt(20), adapter="d", sampling=sampled())
    serving.run()
    assert serving.engine.loader.unload("d")
    serving.add(prompt(20), adapter="a", sampling=sampled())
    serving.run()


def two_ranks(root: Path, **fields: Any) -> "contextlib.closing[Serving]":
    config = config_of(2, model=str(make_checkpoint(root)), **fields)
    return contextlib.closing(Serving(config))


def configured(make: Make, **fields: Any) -> Make:
    return lambda root: {**make(root), **fields}


def borrowed(kind: str) -> Make:
    return lambda root: {"model": str(make_tiny(root, kind)), "model_backend": "transformers"}


def seeing(**fields: Any) -> Make:
    return lambda root: {"model": str(make_vision_checkpoint(root, **fields))}


# Other families and drafters: test_parts_of_models.py (threads), test_steps_from_bytes.py (bytes).
QUICK = {"dense"}
EP = {"experts": "ep"}
CASES: dict[str, tuple[int, Make, int, Any]] = {
    "dense": (2, plain(), NUM_PAGES, serve_and_retract),
    "drafts": (2, drafted("ngram", "llama"), NUM_PAGES, serve_and_retract),
    "four ranks": (4, plain(), NUM_PAGES, serve_again),
    "gloo": (2, configured(plain(), parallel={"collectives": "gloo"}), NUM_PAGES, serve_two),
    "whole experts": (
        4,
        configured(plain("qwen2_moe"), parallel=EP),
        NUM_PAGES,
        serve_and_retract,
    ),
    "latents": (2, drafted("mtp", "deepseek_v3", make_mtp), NUM_PAGES, serve_and_retract),
    "states": (2, drafted("mtp", "qwen3_5_text", make_hybrid_mtp), 44, serve_again),
    "adapters": (2, adapted("a", "b"), NUM_PAGES, serve_and_load_adapters),
    "input embeddings": (2, given, 40, serve_given),
    "transformers": (2, borrowed("granite"), NUM_PAGES, serve_two),
    "transformers, whole KV": (2, borrowed("olmo2"), NUM_PAGES, serve_again),
    "images": (2, seeing(), NUM_PAGES, serve_images),
    "images, seen whole": (
        2,
        seeing(model_type="gemma3"),
        NUM_PAGES,
        partial(serve_images, rows=SQUARE, columns=SQUARE),
    ),
    "images, features of layers": (2, seeing(model_type="qwen3_vl"), NUM_PAGES, serve_images),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_several_ranks_generate_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    tp, make, num_pages, serve = CASES[name]
    fields = make(tmp_path)
    one = answers(config_of(1, num_pages, **fields), serve)
    assert one and answers(config_of(tp, num_pages, **fields), serve) == one


def five(architecture: str = "qwen3", **fields: Any) -> Make:
    return configured(plain(architecture, num_hidden_layers=5), **fields)


# By the name of the case: ranks of a stage, model, pages, and requests.
STAGED: dict[str, tuple[int, Make, int, Any]] = {
    "dense": (1, five(), NUM_PAGES, serve_again),
    "compiled": (1, five(cpu_kernels="auto"), NUM_PAGES, serve_again),
    "windows, two ranks": (2, five("gemma2"), 40, serve_again),
    "latents": (1, five("deepseek_v3"), NUM_PAGES, serve_again),
    "whole experts": (2, five("qwen3_moe", parallel=EP), NUM_PAGES, serve_again),
    "gloo": (1, five(parallel={"collectives": "gloo"}), NUM_PAGES, serve_again),
    "images": (1, seeing(model_type="qwen3_vl", num_hidden_layers=5), NUM_PAGES, serve_images),
    "input embeddings": (1, given, 40, serve_given),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in STAGED],
)
def test_two_stages_generate_the_tokens_of_one_rank(name: str, tmp_path: Path) -> None:
    tp, make, num_pages, serve = STAGED[name]
    fields = make(tmp_path)
    parallel = {**fields.pop("parallel", {}), "pp": 2}
    expected = answers(config_of(1, num_pages, **fields), serve)
    assert answers(config_of(tp, num_pages, parallel=parallel, **fields), serve) == expected


# Seen failing with the experts of the latest forward, and without those of the last stage.
@pytest.mark.long
@pytest.mark.parametrize("tp", [1, 2])
def test_two_stages_return_the_experts_of_all_layers(tp: int, tmp_path: Path) -> None:
    """The first stage has started the next chunk when the experts of the last stage arrive."""
    model = str(make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=5))
    returned = RoutedExpertsConfig(enabled=True)
    asked = {"routed_experts": True, "logprobs": 0, "max_tokens": 12}

    def found(tp: int, **parallel: int) -> tuple[Any, Any]:
        config = config_of(tp, 40, model=model, routed_experts=returned, parallel=parallel)
        with contextlib.closing(Serving(config)) as serving:
            for number, length in enumerate((5, 100, 70)):
                serving.add(prompt(length, number), sampling=sampled(prompt_logprobs=0, **asked))
                serving.add(prompt(length, number), sampling=sampled())
            serving.run()
            return serving.answers, serving.experts

    one = found(1)
    experts = one[1]
    assert len(experts) == 6 and all(any(each) for each in experts.values())
    assert found(tp, pp=2) == one


@pytest.mark.long
def test_a_state_may_need_more_pages_in_one_stage_than_in_the_other(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    layers = [kinds[number in (1, 4)] for number in range(5)]  # 1 of 2 is linear, and 2 of 3
    model = make_checkpoint(tmp_path, "qwen3_5_text", num_hidden_layers=5, layer_types=layers)
    fields = {"model": str(model), "num_pages": 44}

    def serve(serving: Serving) -> None:
        whole = serving.engine.shape.whole
        first, last = (whole.share(0, 1, stage).state_pages for stage in (range(2), range(2, 5)))
        assert first < last
        serve_again(serving)

    expected = answers(config_of(1, **fields), serve)
    assert answers(config_of(1, parallel={"pp": 2}, **fields), serve) == expected


@pytest.mark.long
def test_two_stages_with_adapters_generate_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Each stage has its layers of an adapter, and rejects layers that it does not know."""
    fields = adapted("a", "b")(tmp_path)
    extra = tmp_path / "shelf" / "extra"
    shutil.copytree(tmp_path / "shelf" / "a", extra)
    layer = reference_model(tmp_path / "model").config.num_hidden_layers - 1
    with safe_open(extra / WEIGHTS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    for name in [each for each in tensors if f"layers.{layer}.mlp.up_proj" in each]:
        tensors[name.replace("up_proj", "other")] = tensors.pop(name)
    save_file(tensors, extra / WEIGHTS)
    expected = answers(config_of(1, **fields), serve_and_load_adapters)

    def serve(serving: Serving) -> None:
        serve_and_load_adapters(serving)
        load = serving.engine.loader.load("extra", "extra")
        while not load.done():
            serving.engine.loader.poll()
        with pytest.raises(InvalidRequest, match=rf"no model\.layers\.{layer}\.mlp\.other"):
            load.result()

    assert answers(config_of(1, parallel={"pp": 2}, **fields), serve) == expected


def answer_text(end: Connection, config: EngineConfig) -> None:
    """Send tokens, and wait to be killed: NCCL may not end before its graphs."""
    serving = Serving(config)
    serve_and_retract(serving)
    end.send(dict(serving.answers))
    end.recv()


def answers_of_a_process(config: EngineConfig) -> dict[int, list[int]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=answer_text, args=(theirs, config))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv())
    finally:
        process.kill()
        process.join()


@pytest.mark.two_gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_two_gpus_generate_the_tokens_of_one(graphs: bool, tmp_path: Path) -> None:
    fields = {"model": str(make_checkpoint(tmp_path)), "cuda_graphs": graphs}
    one = answers_of_a_process(config_of(1, device="cuda:0", **fields))
    assert answers_of_a_process(config_of(2, device="cuda:0-1", **fields)) == one


@pytest.mark.long
def test_followers_report_their_free_memory_after_steps(tmp_path: Path) -> None:
    config = config_of(2, model=str(make_checkpoint(tmp_path)))
    with contextlib.closing(
        Followers(config, "tests.support.engine.measuring_follower")
    ) as followers:
        followers.loaded()
        half = FREE_BYTES // 2
        assert followers.free_bytes == half
        followers.measure(half)
        num_slots, chunk, graphs = 12, 32, 1
        assert followers.measured() == half - num_slots - chunk - graphs


@pytest.mark.long
def test_each_rank_has_its_part_of_weights_and_pages(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path))
    with contextlib.ExitStack() as exits:
        one, two = (
            exits.enter_context(contextlib.closing(Serving(config_of(tp, model=model))))
            for tp in (1, 2)
        )
        assert 2 * two.engine.shape.layout.page_bytes == one.engine.shape.layout.page_bytes
        assert two.engine.fingerprint == one.engine.fingerprint
        for serving in (one, two):
            serving.answer(40)
        ours, whole = two.engine.pool, one.engine.pool
        assert np.isfinite(ours.layers[0].float()[0].numpy()).all()
        assert ours.layers[0].shape[1] * 2 == whole.layers[0].shape[1]


@pytest.mark.long
def test_pages_of_every_rank_are_copied_to_host_memory_and_back(tmp_path: Path) -> None:
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    with two_ranks(tmp_path) as serving:
        copier, expected = serving.engine.backend.copier, serving.answer(90)
        lose_pages = CopyPages(False, pages.tobytes(), (NUM_PAGES + pages).tobytes())
        copier.save(PageCopies(pages, pages)).result(PATIENCE_S)
        assert serving.followers.ask(lose_pages).result(PATIENCE_S) == [b""]
        assert serving.answer(90) != expected  # it continues from the prefix cache
        told = threading.Event()
        copier.notify = told.set
        copy = copier.load(PageCopies(pages, pages))
        assert told.wait(PATIENCE_S) and copy.done()
        assert serving.answer(90) == expected


@pytest.mark.long
def test_a_failed_job_on_a_rank_only_raises_its_error(tmp_path: Path) -> None:
    config = config_of(2, **adapted("a", "b")(tmp_path))
    with contextlib.closing(Serving(config)) as serving:
        load = serving.engine.loader.load("e", "nowhere")
        while not load.done():
            serving.engine.loader.poll()
        assert "nowhere" in str(load.exception())
        asked = serving.followers.ask(ReadAdapter(99, "nowhere"))
        with pytest.raises(JobFailed, match=r"lora_path: .*nowhere"):
            asked.result(PATIENCE_S)
        dropped = serving.followers.ask(DropAdapter(99))
        assert dropped.result(PATIENCE_S) == [b""]
        serving.add(prompt(20), adapter="a", sampling=sampled())
        serving.run()


def test_a_failed_step_on_a_follower_is_detected_although_no_one_awaits_it() -> None:
    failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    stream = FollowerStream(WorkerStream(), failed.put)
    stream.submit(lambda: None)
    stream.submit(lambda: {}["key"])
    assert isinstance(failed.get(timeout=PATIENCE_S), KeyError)
    stream.close()
    assert failed.empty()


def test_followers_are_pinged_once_a_second_and_late_ones_are_reported() -> None:
    ping, now = PingTimer([1, 2], silent_s=5.0), 1000.0
    ping.look(now)
    assert ping.is_due
    ping.sent()
    for rank in (1, 2):
        assert not ping.is_due
        ping.reported(rank)
    for step_s, due in ((0.0, False), (0.4, False), (0.5, False), (0.2, True)):
        now += step_s
        ping.look(now)  # like after each reply to a job
        assert ping.is_due == due
    ping.sent()
    ping.reported(2)
    for _ in range(5):
        now += 1.0
        ping.look(now)
        assert not ping.is_due and not ping.late
    now += 1.0
    ping.look(now)
    assert ping.late == [1]
    ping.reported(1)
    assert ping.is_due and not ping.late


def test_a_process_that_was_stopped_does_not_report_others_as_late() -> None:
    ping = PingTimer([1], silent_s=5.0)
    ping.look(1000.0)
    ping.sent()
    ping.look(2000.0)
    assert not ping.late


@pytest.mark.long
def test_every_rank_reports_its_memory_and_progress(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as serving:
        serving.answer(40)
        followers = serving.followers
        (pid,) = followers.pids
        deadline = time.monotonic() + PATIENCE_S
        while (state := followers.states().get(1)) is None or state.steps_behind:
            assert time.monotonic() < deadline, "no report after the last step"
            time.sleep(0.02)
        assert state.memory_bytes == pytest.approx(resident(pid), rel=0.2)
        assert followers.states()[0].memory_bytes == pytest.approx(resident(os.getpid()), rel=0.2)
        assert followers.states()[0].steps_behind == 0
        assert followers.steps_sent == followers.steps_done > 0


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def be_rank_zero(config: str) -> None:
    """Build an engine of two ranks, print the pid of its follower, and run a step for each line."""
    fork_server.fork_from_this_process()
    logs.setup("engine", "info", "text")
    with fork_server.in_use(processes):
        serving = Serving(EngineConfig.model_validate_json(config))
    print(*serving.engine.follower_pids, flush=True)
    while sys.stdin.readline():
        serving.answer(40)


class RankZero:
    """A process with an idle engine of two ranks."""

    def __init__(self, config: EngineConfig, errors: Path) -> None:
        read_end, self._input = os.pipe()
        output, write_end = os.pipe()
        with open(read_end, "rb"), open(write_end, "wb"), open(errors, "wb") as log:
            arguments, environment = [config.model_dump_json()], {**os.environ}
            standard = read_end, write_end, log.fileno()
            self.process = fork_server.start(
                __spec__.name, arguments, environment, Path.cwd(), standard
            )
        with open(output) as lines:
            self.follower = int(lines.readline())
        self._pidfd = os.pidfd_open(self.follower)

    def run_a_step(self) -> None:
        os.write(self._input, b"run\n")

    def follower_ends(self) -> bool:
        return select.select([self._pidfd], [], [], PATIENCE_S)[0] == [self._pidfd]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._input)
        os.close(self._pidfd)


def rank_zero(root: Path, **parallel: Any) -> "contextlib.closing[RankZero]":
    config = config_of(2, model=str(make_checkpoint(root)), parallel=parallel)
    return contextlib.closing(RankZero(config, root / "errors"))


@pytest.mark.parametrize("victim", [pytest.param("rank 0", marks=pytest.mark.long), "rank 1"])
def test_no_rank_outlives_another(victim: str, tmp_path: Path) -> None:
    """One is killed while the engine is idle."""
    with rank_zero(tmp_path) as running:
        first = running.process
        os.kill(first.pid if victim == "rank 0" else running.follower, signal.SIGKILL)
        assert first.wait(PATIENCE_S) == (-signal.SIGKILL if victim == "rank 0" else 1)
        assert running.follower_ends()


REPORTING_FOLLOWER = """
import sys
from engine import follower

def serve(steps, open_transfer):
    steps.send(b"report")
    steps.recv(1)

follower.serve = serve
follower.main([int(sys.argv[1])], None)
"""


# Seen failing with "Connection reset by peer" in the log, and exit code 1.
@pytest.mark.long
def test_a_rank_whose_last_report_is_not_read_ends_with_0() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", REPORTING_FOLLOWER, str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
    with ours:
        poll_ready([ours], seconds=PATIENCE_S)
    assert process.wait(PATIENCE_S) == 0


# Seen failing without a Ping.
@pytest.mark.long  # the time limit of a rank
@pytest.mark.parametrize("step", [False, True])
def test_a_frozen_rank_ends_its_node(step: bool, tmp_path: Path) -> None:
    """By the deadline of the collective, or without a step by its missing reply."""
    with rank_zero(tmp_path, collective_s=1.0) as running:
        os.kill(running.follower, signal.SIGSTOP)
        if step:
            running.run_a_step()
        assert running.process.wait(PATIENCE_S) == 1
        os.kill(running.follower, signal.SIGCONT)
        assert running.follower_ends()


@pytest.mark.long  # the time limit of a silent rank
def test_a_rank_that_freezes_while_idle_is_reported(tmp_path: Path) -> None:
    with rank_zero(tmp_path, collective_s=1.0) as running:
        os.kill(running.follower, signal.SIGSTOP)
        assert running.process.wait(PATIENCE_S) == 1
        errors = (tmp_path / "errors").read_text()
    assert "ranks do not reply" in errors and "ranks=1 " in errors


def staged(make: Make, **fields: Any) -> Make:
    return configured(make, parallel={"pp": 2}, **fields)


@pytest.mark.parametrize(
    "tp, make, why",
    [
        pytest.param(3, plain(), "3 ranks cannot have equal parts of", marks=pytest.mark.long),
        (
            2,
            borrowed("opt"),
            r"OPTForCausalLM .* 2 ranks: transformers has no tensor-parallel plan",
        ),
        (1, staged(drafted("ngram", "llama")), r"speculative\.method: ngram .*pp 2"),
        (1, staged(seeing(model_type="qwen3_vl")), "the first 2 of 3 layers"),
        pytest.param(
            1,
            staged(
                plain("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=2),
                routed_experts=RoutedExpertsConfig(enabled=True),
            ),
            "the layers of one stage have no experts",
            marks=pytest.mark.long,
        ),
    ],
    ids=["ranks", "class", "drafts in stages", "images in stages", "experts in stages"],
)
def test_unsupported_features_of_ranks_and_stages_are_rejected_by_name(
    tp: int, make: Make, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        build(config_of(tp, **make(tmp_path)), FOLLOWER)


REBALANCED = {"experts": "ep", "redundant_experts": 4, "rebalance_steps": 5}


@pytest.mark.long
@pytest.mark.parametrize(
    ("tp", "architecture", "parallel"),
    [(2, "llama", {}), (1, "llama", {"pp": 2}), (2, "qwen2_moe", REBALANCED)],
)
def test_every_rank_updates_weights_and_releases_memory(
    tp: int, architecture: str, parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Also weights that only rank 0 has received, and those of experts that have moved."""
    root = tmp_path / "weights"
    first = make_checkpoint(root / "a", architecture)
    second = make_checkpoint(root / "b", architecture, seed=1)

    def answer(serving: Serving) -> list[int]:
        serving.engine.cache.flush()
        return serving.answer(40)

    expected = []
    for model in (first, second):
        with contextlib.closing(Serving(config_of(1, model=str(model)))) as one:
            expected.append(answer(one))
    assert expected[0] != expected[1]
    config = config_of(tp, model=str(first), weights_dir=root, parallel=parallel)
    with contextlib.closing(Serving(config)) as serving:
        weights = serving.engine.weights
        assert answer(serving) == expected[0]
        weights.put(weights.prepare("b").result(PATIENCE_S)).result(PATIENCE_S)
        assert answer(serving) == expected[1]
        weights.release().result(PATIENCE_S)
        serving.engine.page_memory.release()
        weights.restore().result(PATIENCE_S)
        assert answer(serving) == expected[1]
        received = weights.receive()
        file = (first / "model.safetensors").read_bytes()
        received.write(0, memoryview(file))
        weights.put(weights.prepare_received(received, "peer").result(PATIENCE_S)).result(
            PATIENCE_S
        )
        assert answer(serving) == expected[0]
        if (balancer := serving.engine.balancer) is not None:
            assert balancer.num_moved > 0


@pytest.mark.long
def test_experts_move_between_ranks_under_load(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path, "qwen2_moe"))

    def serve(serving: Serving) -> None:
        serve_two(serving)
        if (balancer := serving.engine.balancer) is not None:
            assert balancer.num_moved > 0 and balancer.seconds > 0

    one = answers(config_of(1, model=model), serve_two)
    assert answers(config_of(2, model=model, parallel=REBALANCED), serve) == one


@pytest.mark.long
def test_experts_whose_files_have_changed_are_not_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a model would have experts of another one."""
    model = make_checkpoint(tmp_path / "model", "qwen2_moe")
    one = answers(config_of(1, model=str(model)), serve_two)
    config = config_of(2, model=str(model), parallel=REBALANCED)
    with contextlib.closing(Serving(config)) as serving:
        other = make_checkpoint(tmp_path / "other", "qwen2_moe", seed=1)
        (other / "model.safetensors").replace(model / "model.safetensors")
        serve_two(serving)
        assert serving.answers == one
        assert serving.engine.balancer is not None and serving.engine.balancer.num_moved == 0
        assert "experts are not moved" in caplog.text


def exchange_slots(directory: Path) -> None:
    """Leave valid pages in other slots than before, as an incomplete write may."""
    index = bytearray((directory / "index").read_bytes())
    records = dict(unpacked(bytes(index[HEADER_BYTES:])))
    pages = np.fromfile(directory / "pages", np.uint8).reshape(len(records), -1)
    slots = sorted(records)
    for slot, other in zip(slots, slots[::-1], strict=True):
        at = HEADER_BYTES + slot * RECORD_BYTES
        index[at : at + RECORD_BYTES] = packed(records[other], slot)
    pages[slots[::-1]].tofile(directory / "pages")
    (directory / "index").write_bytes(index)


@pytest.mark.long
def test_host_memory_of_followers_is_kept_like_that_of_rank_0(tmp_path: Path) -> None:
    """It has evicted prefixes, which another role has, too."""
    offload = OffloadConfig(cpu_bytes=1 << 20)
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    with two_ranks(tmp_path, offload=offload) as serving:
        copier, expected = serving.engine.backend.copier, serving.answer(90)
        copier.save(PageCopies(pages, pages)).result(PATIENCE_S)
        serving.engine.equip_followers()
        copier.load(PageCopies(pages, pages)).result(PATIENCE_S)
        assert serving.answer(90) == expected  # it continues from the prefix cache


@pytest.mark.parametrize("harm", ["none", "other bytes", "other slots"])
@pytest.mark.long
def test_pages_in_the_files_of_all_ranks_outlive_the_node(tmp_path: Path, harm: str) -> None:
    """Seen failing without the comparison of records, and with only the files of rank 0."""
    files = OffloadConfig(cpu_bytes=1 << 20, disk_dir=tmp_path / "files", disk_bytes=1 << 20)
    config = config_of(2, model=str(make_checkpoint(tmp_path / "model")), offload=files)
    with contextlib.closing(Serving(config)) as first:
        expected = first.answer(64)
        poll_until(first.engine, lambda: len(first.engine.tiers.files.cache.index) >= 4)
        poll_until(first.engine, lambda: not first.engine.tiers.busy)
    (directory,) = (tmp_path / "files" / "0" / "rank-1").iterdir()
    if harm == "other bytes":
        pages = np.fromfile(directory / "pages", np.uint8)
        (pages ^ 255).tofile(directory / "pages")
    elif harm == "other slots":
        exchange_slots(directory)
    with contextlib.closing(Serving(config)) as second:
        tokens = bring_four_pages(second.engine, np.array(prompt(64), np.int32))
        assert tokens == (64 if harm == "none" else 0)
        assert second.answer(64) == expected


@pytest.mark.long
def test_all_ranks_allocate_the_host_pages_of_another_role(tmp_path: Path) -> None:
    """Seen failing without ReplaceHostPages: followers then swap pages that they do not have."""
    model = str(make_checkpoint(tmp_path))
    one, two = config_of(1, model=model), config_of(2, model=model)
    none = two.model_copy(update={"cache": two.cache.model_copy(update={"swap_pages": 0})})

    def serve(serving: Serving) -> None:
        serving.answer(40)
        if serving.engine.follower_pids:
            serving.equip(two)
        serve_and_retract(serving)

    assert answers(none, serve) == answers(one, serve)


if __name__ == "__main__":
    be_rank_zero(sys.argv[1])
