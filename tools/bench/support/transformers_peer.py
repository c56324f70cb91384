"""transformers' continuous batching as a peer of benchmarks, on the same model and prompts.

Runs in its own process, so that its threads and CPU time are separate. It is called as a library
without RPC and streaming, which is in its favour. Each line of stdin is a spec (JSON), and the
response is a line of JSON on stdout.

The numbers of cache pages, tokens per batch and requests per batch are set, because it would
otherwise take 60 % of the machine's memory, and masks of that size. Prefix sharing is off, because
no prompts share a prefix and it costs a little. CUDA graphs and asynchronous batching are forced on
CUDA, which disables them without flash attention. On a CPU, transformers has neither and rejects
them.
"""

import contextlib
import dataclasses
import json
import sys
import time
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from bench.traffic.workload import WorkloadRequest
from tools.bench.support.load import Answer, cpu_row, summary

PAGE_SIZE = 32
RESULT_S = 60.0  # timeout of any response


def main() -> None:
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # library output
        for line in sys.stdin:
            print(json.dumps(_reply(json.loads(line))), file=replies, flush=True)


def _reply(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the spec's jobs, and their tokens."""
    warm_up, jobs = ([WorkloadRequest(*job) for job in spec[name]] for name in ("warm_up", "jobs"))
    torch.set_num_threads(spec["threads"])
    model = _model(spec["model"], spec["dtype"], spec["device"])
    answers, cpu_s = _closed_loop(model, warm_up, jobs, spec["streams"])
    tokens = [answer.token_ids for answer in answers]
    return {**summary(answers), **cpu_row({"process": cpu_s}, answers), "token_ids": tokens}


@lru_cache(maxsize=1)
def _model(directory: str, dtype: str, device: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def _closed_loop(
    model: Any, warm_up: list[WorkloadRequest], jobs: list[WorkloadRequest], streams: int
) -> tuple[list[Answer], float]:
    """Return the responses in job order, and the CPU seconds of this process."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1)
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    accelerated = True if model.device.type == "cuda" else None
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=(streams + 1) * (longest // PAGE_SIZE + 1),
        max_batch_tokens=max(512, 2 * streams),
        max_requests_per_batch=streams,
        allow_block_sharing=False,
        use_cuda_graph=accelerated,
        use_async_batching=accelerated,
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        _answers(manager, warm_up, streams)
        started = time.process_time()
        answers = _answers(manager, jobs, streams)
        return answers, time.process_time() - started


def _answers(
    manager: ContinuousBatchingManager, jobs: list[WorkloadRequest], streams: int
) -> list[Answer]:
    waiting = iter(enumerate(jobs))
    under_way: dict[str, tuple[int, Answer]] = {}
    ended: dict[int, Answer] = {}

    def submit() -> None:
        for index, job in waiting:
            now = time.perf_counter()
            answer = Answer(job.group, len(job.prompt), due=now, sent=now)
            name = manager.add_request(
                list(job.prompt), max_new_tokens=job.max_tokens, record_timestamps=True
            )
            under_way[name] = index, answer
            return

    for _ in range(streams):
        submit()
    while under_way:
        result = manager.get_result(timeout=RESULT_S)
        if result is None:
            raise SystemExit("transformers' continuous batching stopped answering")
        index, answer = under_way.pop(result.request_id)
        answer = dataclasses.replace(
            answer,
            chunks=list(result.timestamps or ()),
            token_ids=list(result.generated_tokens),
            output_tokens=len(result.generated_tokens),
            ended=time.perf_counter(),
            error=result.error or "",
        )
        ended[index] = answer
        submit()
    return [ended[index] for index in range(len(jobs))]


if __name__ == "__main__":
    main()
