"""`return_logprob` of /generate, with requests of SGLang's clients."""

import asyncio

from protos.decode_pb2 import FINISH_REASON_LENGTH, FromNode, RowLogprobs, Step
from protos.sampling_pb2 import Logprobs
from tests.api.models import byte_level_tokenizer, ids
from tests.api.native.test_native import GENERATE
from tests.support.network.http_client import sse_events

PROMPT = [5, 6, 7, 8]
TOKENS = ids(" one two")
FROM_TOKEN_2 = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 2}


def likeliest(num_rows: int) -> Logprobs:
    """Return the log-probabilities of tokens, each with two likeliest tokens at its position."""
    return Logprobs(
        logprob=[-0.5, -1.5, *[-2.5] * (num_rows - 2)],
        num_top=2,
        top_token=[9, 10] * num_rows,
        top_logprob=[-0.25, float("-inf")] * num_rows,
    )


async def test_each_entry_is_a_number_a_token_and_its_text(api):
    asking = asyncio.create_task(api.post(GENERATE, **FROM_TOKEN_2, return_text_in_logprobs=True))
    submit = await api.node.submitted()
    sampling = submit.sampling
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.prompt_logprobs_start) == (
        0,
        0,
        2,
    )
    rows = [RowLogprobs(request=submit.number, logprobs=Logprobs(logprob=[-0.5, -1.5]))]
    api.node.send(FromNode(step=Step(prompt_logprobs=rows)))
    generated = [-1.0, float("-inf"), *[-3.0] * (len(TOKENS) - 2)]
    api.node.finish(submit.number, TOKENS, logprobs={submit.number: generated})
    meta = (await asking).json["meta_info"]
    text = byte_level_tokenizer().decode
    # SGLang returns no log-probability of the first token.
    assert meta["input_token_logprobs"] == [[None, 7, text([7])], [-1.5, 8, text([8])]]
    assert meta["output_token_logprobs"][:2] == [
        [-1.0, TOKENS[0], text(TOKENS[:1])],
        [-9999.0, TOKENS[1], text(TOKENS[1:2])],  # JSON has no infinity
    ]
    assert len(meta["output_token_logprobs"]) == len(TOKENS)
    assert not {"input_top_logprobs", "output_top_logprobs"} & set(meta)


async def test_the_likeliest_tokens_are_in_separate_lists(api):
    asking = asyncio.create_task(api.post(GENERATE, **FROM_TOKEN_2, top_logprobs_num=2))
    submit = await api.node.submitted()
    rows = [RowLogprobs(request=submit.number, logprobs=likeliest(2))]
    api.node.send(FromNode(step=Step(prompt_logprobs=rows)))
    rows = [RowLogprobs(request=submit.number, logprobs=likeliest(len(TOKENS)))]
    step = Step(request=[submit.number] * len(TOKENS), token=TOKENS, logprobs=rows)
    api.node.send(FromNode(step=step))
    api.node.finish(submit.number)
    meta = (await asking).json["meta_info"]
    top = [[-0.25, 9, None], [-9999.0, 10, None]]
    assert meta["input_top_logprobs"] == [None, top]
    assert meta["output_top_logprobs"] == [top] * len(TOKENS)


async def test_an_event_of_a_stream_has_the_logprobs_so_far(api, wire):
    await wire.post(GENERATE, {"input_ids": PROMPT, "return_logprob": True, "stream": True})
    number = (await api.node.submitted()).number
    api.node.say({number: TOKENS[:2]}, logprobs={number: [-1.0, -2.0]})
    assert (await wire.head())[0] == 200
    chunks = wire.chunks()
    stream = await anext(chunks)
    api.node.finish(number, TOKENS[2:3], logprobs={number: [-3.0]})
    stream += b"".join([chunk async for chunk in chunks])
    metas = [event["meta_info"] for event in sse_events(stream)]
    counts = [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas]
    assert counts == [[-1.0, -2.0], [-1.0, -2.0, -3.0]]
    assert all(meta["input_token_logprobs"] == [] for meta in metas)


async def test_a_prompt_is_scored_without_generation(api):
    """SGLang's frontend language scores choices in this way."""
    sampling = {"max_new_tokens": 0, "temperature": 0.0}
    asking = asyncio.create_task(api.post(GENERATE, sampling_params=sampling, **FROM_TOKEN_2))
    submit = await api.node.submitted()
    assert submit.sampling.max_tokens == 1
    rows = [RowLogprobs(request=submit.number, logprobs=Logprobs(logprob=[-0.5, -1.5]))]
    api.node.send(FromNode(step=Step(prompt_logprobs=rows)))
    api.node.finish(submit.number, [9], FINISH_REASON_LENGTH, logprobs={submit.number: [-2.5]})
    answer = (await asking).json
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [] and meta["completion_tokens"] == 0
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [entry[0] for entry in meta["input_token_logprobs"]] == [None, -1.5]


async def test_none_are_returned_unless_requested(api):
    submit, answer = await api.ask(GENERATE, text="x", logprob_start_len=0, top_logprobs_num=3)
    assert not submit.sampling.HasField("logprobs")
    assert not submit.sampling.HasField("prompt_logprobs")
    assert not [name for name in answer.json["meta_info"] if "logprobs" in name]
