"""Requests with every field and header of `vllm bench serve`, and the response fields that it
reads. They follow its source. docs/load.md has the command."""

from typing import Any

import pytest

from tests.api.rig import CHAT, COMPLETIONS, Api
from tests.support.network.http_client import Response, get, post

ASKED = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {"prompt": "the fox", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
CONVERSATION = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}],
    "max_completion_tokens": 8,
}
# --temperature and similar options are sent in addition
EXTRA = {"temperature": 0.0, "top_p": 0.9, "top_k": 10, "min_p": 0.0, "frequency_penalty": 0.1}


async def answered(api: Api, path: str, **fields: Any) -> Response:
    submit, answer = await api.answered(
        post(
            api.router.http_port,
            path,
            {"model": api.model, **fields, **ASKED},
            x_request_id="bench-0a1b2c3d-0",
            authorization="Bearer none",
        ),
        "quick",
        cached_tokens=1,
    )
    assert submit.sampling.max_tokens == 8
    assert answer.headers["x-request-id"] == "bench-0a1b2c3d-0"
    return answer


def tokens_and_usage(response: Response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Separate token events from the usage event like the tool.

    An event with choices contains tokens. One without choices is the end.
    """
    assert response.status == 200
    chosen = [event["choices"][0] for event in response.events if event.get("choices")]
    (usage,) = (e["usage"] for e in response.events if not e.get("choices") and e.get("usage"))
    return chosen, usage


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, EXTRA], ids=["plain", "eos", "extra"])
@pytest.mark.parametrize("path, asked", [(COMPLETIONS, COMPLETION), (CHAT, CONVERSATION)])
async def test_requests_of_the_tool_are_answered(api, path, asked, more):
    chosen, usage = tokens_and_usage(await answered(api, path, **asked, **more))
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chosen
    ]
    assert "".join(texts) == "quick"
    assert usage["completion_tokens"] > 0 and usage["prompt_tokens"] > 0


async def test_the_tool_detects_the_model_and_reads_metrics(api):
    (first,) = (await get(api.router.http_port, "/v1/models")).json["data"]
    assert first["id"] == first["root"] == api.model
    assert (await get(api.router.http_port, "/metrics")).status == 200
