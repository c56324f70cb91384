"""Input embeddings of clients: SGLang's `input_embeds` over HTTP, packed over gRPC."""

import asyncio
from array import array

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from api.dialect.generation_endpoint import DialectReader
from api.dialect.problems import ApiError
from api.native.generate import NATIVE
from api.parsers.model_format import ModelFormat
from common.request import GIVEN_TOKEN
from protos.router_pb2 import InputEmbeddings
from tests.api.models import ids
from tests.api.rig import rest

MATRIX = [[0.5, -1.0], [2, 3.25], [0.0, 1e-3]]
PACKED = array("f", [number for row in MATRIX for number in row]).tobytes()


async def submitted(api, **fields):
    answering = asyncio.create_task(api.post("/generate", **fields))
    submit = await api.node.submitted()
    api.node.finish(submit.number, ids(" x"))
    return submit, (await answering).json


async def test_generate_passes_a_matrix_on(api):
    submit, answer = await submitted(api, input_embeds=MATRIX)
    assert submit.input_embeddings == PACKED
    assert [*submit.token_ids] == [GIVEN_TOKEN] * 3
    assert answer["text"] == " x" and answer["meta_info"]["prompt_tokens"] == 3


async def test_a_list_of_matrices_has_a_response_each(api):
    answering = asyncio.create_task(api.post("/generate", input_embeds=[MATRIX, MATRIX[:1]]))
    found = []
    for _ in range(2):
        submit = await api.node.submitted()
        found.append(len(submit.input_embeddings))
        api.node.finish(submit.number, ids(" x"))
    assert sorted(found) == [8, 24] and len((await answering).json) == 2


async def test_grpc_has_a_message_for_embeddings(client, node):
    embeddings = InputEmbeddings(values=PACKED, num_tokens=3)
    call = client.generate(input_embeddings=embeddings)
    submit = await node.submitted()
    assert submit.input_embeddings == PACKED and len(submit.token_ids) == 3
    node.finish(submit.number, ids(" x"))
    assert (await rest(call))[-1].usage.prompt_tokens == 3


NO_MATRICES = [
    ({"input_embeds": [[0.5, 1.0], [2.0]]}, "input_embeds has rows of different lengths"),
    ({"input_embeds": [[0.5, [1.0]]]}, "input_embeds must be a matrix"),
    ({"input_embeds": [[0.5], [[1.0]]]}, "input_embeds must be a matrix"),
    ({"input_embeds": [[[0.5]]] * 129}, "at most 128 responses"),
    ({"input_embeds": [[0.5, "1"]]}, "input_embeds"),
    ({"input_embeds": [[]]}, "text: set exactly one of text, input_ids and input_embeds"),
    ({"input_embeds": MATRIX, "text": "x"}, "exactly one of"),
    ({"input_embeds": [[0.5]] * 5000}, "input_embeds has 5000 tokens"),
    ({"input_embeds": MATRIX, "return_hidden_states": True}, "not supported for prompts with"),
]


async def test_an_invalid_matrix_is_rejected_by_name(api):
    for fields, error in NO_MATRICES:
        refused = await api.post("/generate", **fields)
        assert refused.status == 400 and error in refused.json["error"]["message"]


@pytest.mark.parametrize(
    "embeddings, error",
    [
        ({"values": PACKED[:-1], "num_tokens": 3}, "23 bytes are not float32 [3, hidden size]"),
        ({"values": PACKED}, "24 bytes are not float32 [0, hidden size]"),
        ({"values": b"", "num_tokens": 3}, "0 bytes"),
        ({"values": PACKED, "num_tokens": 1 << 31}, "tokens; the context"),
    ],
)
async def test_packed_embeddings_need_their_shape(client, embeddings, error):
    with pytest.raises(AioRpcError) as refused:
        await rest(client.generate(input_embeddings=InputEmbeddings(**embeddings)))
    assert refused.value.code() is StatusCode.INVALID_ARGUMENT
    assert error in refused.value.details()


def test_a_matrix_over_the_limit_is_rejected_before_it_is_converted():
    row = b"[" + b",".join([b"0.5"] * 1024) + b"]"
    body = b'{"input_embeds": [' + b",".join([row] * 1025) + b"]}"
    with pytest.raises(ApiError, match="input_embeds has 4198400 bytes, 4194304 allowed"):
        DialectReader(NATIVE, ModelFormat(), ignore_unknown=False).read(body, [])
