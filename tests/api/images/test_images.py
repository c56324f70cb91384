"""Images as OpenAI's own client sends them. A node receives the pixels that transformers' image
processor makes, at the place of the model's marker. Excessive images are rejected by name."""

import asyncio
import base64
import io
import ipaddress
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from grpc.aio import AioRpcError

pytest.importorskip("PIL")

import torch
from PIL import Image as Pillow

from api.images.decoder import fit_of
from api.images.pictures import MAX_ENCODED_BYTES, Address, HttpFetch, ImageLoader, is_public
from common import rpc
from common.config import ImagesConfig
from common.errors import ConfigError, InvalidRequest
from common.limits import MAX_PIXEL_BYTES
from common.model_directory import vision_files
from common.requests.images import check_images, from_proto
from common.rpc import MAX_MESSAGE_BYTES
from engine.models.vision.seeing import encoder_inputs
from protos import router_pb2, router_pb2_grpc
from tests.api.rig import Api, api_for
from tests.support.hardware.devices import CPU
from tests.support.models.vision import (
    BEGIN_ID,
    END_ID,
    SIDE,
    files_of,
    image_processor,
    write_vision_files,
)

MAX_TOKENS = 64
PREPROCESSING = "preprocessor_config.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_files(tmp_path_factory.mktemp("seeing"), max_pixels=MAX_TOKENS * SIDE**2)


@pytest.fixture
async def api(model: Path) -> AsyncIterator[Api]:
    async with api_for(model, images=ImagesConfig(max_images=3)) as api:
        yield api


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Pillow.Image:
    bands = len(Pillow.new(mode, (1, 1)).getbands())
    shape = (height, width, bands) if bands > 1 else (height, width)
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def encoded(image: Pillow.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/any;base64,{base64.b64encode(content).decode()}"


def part(content: bytes, detail: str = "auto") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content), "detail": detail}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def submitted(api: Api, *parts: dict[str, Any]) -> Any:
    create = api.client.chat.completions.create
    answer = asyncio.create_task(create(model=api.model, messages=said(*parts)))  # type: ignore[call-overload]
    submit = await api.complete()
    assert (await answer).usage.prompt_tokens == len(submit.token_ids)
    return submit


async def refused(api: Api, *parts: dict[str, Any]) -> str:
    with pytest.raises(openai.BadRequestError) as raised:
        await api.client.chat.completions.create(model=api.model, messages=said(*parts))  # type: ignore[call-overload]
    return str(raised.value)


async def test_nodes_receive_the_output_of_transformers_image_processor(api, model):
    first = encoded(drawn(50, 33), "JPEG")
    second = encoded(drawn(200, 90, "RGBA", seed=1), "WEBP", lossless=True)
    submit = await submitted(api, text("One "), part(first), text(" and two "), part(second))
    images = from_proto(submit.images)
    check_images(images, submit.token_ids)
    opened = [Pillow.open(io.BytesIO(each)) for each in (first, second)]
    expected = image_processor(max_pixels=MAX_TOKENS * SIDE**2)(opened, return_tensors="pt")
    made = [encoder_inputs(image, files_of(model), CPU, torch.float32) for image in images]
    for name in ("pixel_values", "image_grid_thw"):
        together = torch.cat([each[name] for each in made])
        torch.testing.assert_close(together, expected[name], atol=1e-5, rtol=1e-5)
    for image in images:
        around = submit.token_ids[image.at - 1], submit.token_ids[image.end]
        assert around == (BEGIN_ID, END_ID)


async def seen_by(directory: Path, model_type: str) -> tuple[Any, Any]:
    """Return the request with two images that a node of this model receives, whose pixels are
    those of transformers, and the images."""
    shown = [encoded(drawn(50, 33)), encoded(drawn(20, 301, seed=1))]
    write_vision_files(directory, model_type=model_type)
    async with api_for(directory) as api:
        submit = await submitted(api, *map(part, shown), text("Which is longer?"))
        assert "has 1 placeholders for 0 images" not in await refused(api, part(b"no image"))
    images = from_proto(submit.images)
    check_images(images, submit.token_ids)
    opened = [Pillow.open(io.BytesIO(each)) for each in shown]
    expected = image_processor(model_type=model_type)(opened, return_tensors="pt")["pixel_values"]
    files = files_of(directory)
    made = [encoder_inputs(image, files, CPU, torch.float32)["pixel_values"] for image in images]
    torch.testing.assert_close(torch.cat(made), expected, atol=1e-5, rtol=1e-5)
    return submit, images


async def test_images_of_llava_are_squares_of_their_middle(tmp_path):
    await seen_by(tmp_path, "llava")
    files = files_of(tmp_path)
    with pytest.raises(InvalidRequest, match="has 36 tokens, 35 are allowed: detail low"):
        fit_of(33, 50, files, 35)
    with pytest.raises(ConfigError, match="every image of this model has 36 tokens"):
        ImageLoader(files, ImagesConfig(max_tokens_per_image=35))


async def test_images_of_gemma_are_stretched_and_between_blank_lines(tmp_path):
    submit, (first, second) = await seen_by(tmp_path, "gemma3")
    ids, blank = list(submit.token_ids), list(b"\n\n")
    assert ids[first.at - 3 : first.at] == [*blank, BEGIN_ID]
    assert ids[first.end : second.at] == [END_ID, *blank, *blank, BEGIN_ID]
    assert ids[second.end : second.end + 3] == [END_ID, *blank]


@pytest.mark.parametrize(
    "model_type, file, fields, message",
    [
        ("llava", PREPROCESSING, {"do_center_crop": False}, "do_center_crop is False"),
        ("llava", PREPROCESSING, {"resample": 2}, "resample is 2, expected 3"),
        ("llava", PREPROCESSING, {"size": {"shortest_edge": 20}}, "the encoder needs 24"),
        ("llava", "config.json", {"vision_feature_select_strategy": "full"}, "strategy is full"),
        ("gemma3", PREPROCESSING, {"do_pan_and_scan": True}, "do_pan_and_scan is true"),
    ],
)
def test_unsupported_settings_of_images_are_reported_by_name(
    tmp_path, model_type, file, fields, message
):
    path = write_vision_files(tmp_path, model_type=model_type) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError, match=message):
        vision_files(tmp_path)


@pytest.mark.parametrize("file, field", [("config.json", "vision_config"), (None, None)])
def test_without_an_encoder_or_a_processor_only_text_is_served(tmp_path, file, field):
    write_vision_files(tmp_path, model_type="qwen3_5")
    path = tmp_path / (file or PREPROCESSING)
    if field is None:
        path.unlink()
    else:
        config = json.loads(path.read_text())
        del config[field]
        path.write_text(json.dumps(config))
    assert vision_files(tmp_path) is None


async def test_an_image_is_rotated_by_its_orientation_tag(api):
    exif = Pillow.Exif()
    exif[0x0112] = 6
    submit = await submitted(api, part(encoded(drawn(64, 16), "JPEG", exif=exif)))
    assert (submit.images[0].rows, submit.images[0].columns) == (8, 2)


def to_responses(content: bytes) -> tuple[str, dict[str, Any]]:
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": data_url(content), "detail": "auto"},
    ]
    return "/v1/responses", {"input": [{"role": "user", "content": parts}]}


def to_messages(content: bytes) -> tuple[str, dict[str, Any]]:
    data = base64.b64encode(content).decode()
    blocks = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ]
    return "/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": blocks}]}


SPELT = [to_responses, to_messages]


async def over_grpc(api: Api, call: str, *parts: router_pb2.ChatPart) -> Any:
    """Return the response of that method to one turn with these parts."""
    turn = router_pb2.ChatMessage(role="user", parts=parts)
    messages = router_pb2.ChatMessages(messages=[turn])
    kind = {"Generate": "GenerateRequest", "Tokenize": "TokenizeRequest"}[call]
    request = getattr(router_pb2, kind)(messages=messages)
    async with rpc.make_channel(f"127.0.0.1:{api.router.port}") as channel:
        answer = getattr(router_pb2_grpc.RouterStub(channel), call)(request)  # type: ignore[no-untyped-call]
        return [each async for each in answer] if call == "Generate" else await answer


def spelt(content: bytes) -> list[router_pb2.ChatPart]:
    return [router_pb2.ChatPart(text="What is this?"), router_pb2.ChatPart(image=content)]


async def test_different_notations_give_the_same_prompt(api):
    content = encoded(drawn(50, 33))
    chat = await submitted(api, text("What is this?"), part(content))
    asked = [api.post(path, **fields) for path, fields in (spell(content) for spell in SPELT)]
    for asking in (*asked, over_grpc(api, "Generate", *spelt(content))):
        submit, _ = await api.answered(asking)
        assert list(submit.token_ids) == list(chat.token_ids)
        assert list(submit.images) == list(chat.images)


async def test_counted_tokens_of_a_conversation_are_those_of_its_prompt(api):
    content = encoded(drawn(50, 33))
    parts = [text("What is this?"), part(content)]
    expected = list((await submitted(api, *parts)).token_ids)
    tokens = await api.post("/tokenize", messages=said(*parts), return_token_strs=True)
    assert (tokens.json["tokens"], tokens.json["count"]) == (expected, len(expected))
    assert len(tokens.json["token_strs"]) == len(expected)
    path, fields = to_messages(content)
    counted = await api.post(f"{path}/count_tokens", messages=fields["messages"])
    assert counted.json == {"input_tokens": len(expected)}
    assert list((await over_grpc(api, "Tokenize", *spelt(content))).token_ids) == expected


@pytest.mark.parametrize("spell", SPELT)
async def test_limits_are_the_same_in_every_notation(api, spell):
    path, fields = spell(b"no image at all")
    answer = await api.post(path, **fields)
    assert answer.status == 400 and "expected PNG, JPEG, WEBP, GIF" in answer.body.decode()
    path, fields = spell(encoded(drawn(8, 8)))
    turn = fields["input" if "input" in fields else "messages"][0]
    turn["content"] = [turn["content"][1]] * 4
    answer = await api.post(path, **fields)
    assert answer.status == 400 and "4 images, 3 allowed" in answer.body.decode()


async def test_an_invalid_image_in_any_notation_is_rejected_by_name(api):
    asked = [{"role": "user", "content": [{"type": "input_image", "detail": "low"}]}]
    answer = await api.post("/v1/responses", input=asked)
    assert answer.error["param"] == "input[0].content[0].image_url"
    source = {"type": "url", "url": "https://example.com/a.png"}
    asked = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = await api.post("/v1/messages", messages=asked, max_tokens=1)
    assert answer.status == 400 and "images.allow-urls" in answer.body.decode()
    asked[0]["content"] = [{"type": "image", "source": {"type": "base64"}}]
    answer = await api.post("/v1/messages", messages=asked, max_tokens=1)
    assert "messages[0].content[0] is not a valid image block" in answer.body.decode()
    for parts, why in (
        ([router_pb2.ChatPart()], "neither a text nor an image"),
        ([router_pb2.ChatPart(image=bytes(MAX_ENCODED_BYTES + 1))], "bytes allowed"),
    ):
        with pytest.raises(AioRpcError) as caught:
            await over_grpc(api, "Tokenize", *parts)
        assert why in str(caught.value.details())


async def test_low_detail_gives_fewer_tokens(api):
    # Images below the size of low detail are unchanged.
    submit = await submitted(api, part(encoded(drawn(64, 64)), "low"))
    assert len(submit.images[0].pixels) == 64 * 64 * 3


async def test_the_same_image_has_the_same_tokens_and_another_has_others(api):
    one, same = encoded(drawn(40, 40)), encoded(drawn(40, 40), "WEBP", lossless=True)
    other = encoded(drawn(40, 40, seed=2))
    asked = [await submitted(api, part(each), text("?")) for each in (one, same, other)]
    assert list(asked[0].token_ids) == list(asked[1].token_ids)
    assert list(asked[0].token_ids) != list(asked[2].token_ids)
    assert len(asked[0].token_ids) == len(asked[2].token_ids)


WRONG = [
    ([part(encoded(drawn(8, 8)))] * 4, "4 images, 3 allowed"),
    ([part(b"no image at all")], "expected PNG, JPEG, WEBP, GIF"),
    ([part(encoded(drawn(40, 40))[:400])], "damaged"),
    ([part(encoded(drawn(10, 2500)))], "times as long"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], "base64"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}], "base64"),
    (
        [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
        "images.allow-urls",
    ),
    ([text("<|image_pad|>"), part(encoded(drawn(8, 8)))], "2 placeholders for 1 images"),
]


async def test_an_invalid_image_is_rejected_by_name(api):
    for parts, reason in WRONG:
        assert reason in await refused(api, *parts)


async def test_all_images_of_a_request_must_fit_into_the_context(model):
    async with api_for(model, images=ImagesConfig(max_images=64)) as api:
        many = [part(encoded(drawn(64, 64)))] * 20  # of 64 tokens each, in a context of 1024
        assert "an image has 64 tokens, " in await refused(api, *many)


async def test_a_text_model_rejects_images(tmp_path):
    directory = write_vision_files(tmp_path, sees=False)
    async with api_for(directory) as api:
        assert "does not support images" in await refused(api, part(encoded(drawn(8, 8))))


@pytest.mark.parametrize("detail", [None, 256])
@pytest.mark.parametrize("size", [(33, 50), (90, 200), (8, 8), (3, 5), (1000, 700), (20, 3000)])
def test_sizes_are_those_of_transformers(model, size, detail):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    files = files_of(model)
    height, width = smart_resize(*size, SIDE, files.size.min_pixels, files.size.max_pixels)
    fit = fit_of(*size, files, detail or 10**6)
    assert (fit.rows * SIDE, fit.columns * SIDE) == fit.resized == (height, width)


# URLs ---------------------------------------------------------------------------------------------


class Names(AbstractResolver):
    """Resolve every name to this address."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = {"hostname": host, "host": self.address, "port": port}
        return [ResolveResult(**found, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None:
        pass


class Unasked(Names):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        raise AssertionError(f"{host} was looked up")


@pytest.fixture
async def site() -> AsyncIterator[str]:
    """Serve a small file, a large one, an endless one, and a redirect."""

    over = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"x")
        await over.wait()
        return answer

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/small")

    async def sized(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (10 if request.path == "/small" else 1000))

    app = web.Application()
    app.router.add_get("/small", sized)
    app.router.add_get("/large", sized)
    app.router.add_get("/slow", slow)
    app.router.add_get("/elsewhere", elsewhere)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    yield f"images.example:{runner.addresses[0][1]}"
    over.set()
    await runner.cleanup()


def anywhere(address: Address) -> bool:
    return True


async def test_an_image_is_fetched_from_the_resolved_address(site):
    fetch = HttpFetch(60.0, anywhere, lambda: Names("127.0.0.1"))
    assert await fetch(f"http://{site}/small", 100) == b"x" * 10
    for path, reason in (("large", "more than"), ("elsewhere", "302"), ("nothing", "404")):
        with pytest.raises(InvalidRequest, match=reason):
            await fetch(f"http://{site}/{path}", 100)


async def test_an_endless_response_is_abandoned(site):
    fetch = HttpFetch(0.2, anywhere, lambda: Names("127.0.0.1"))
    with pytest.raises(InvalidRequest, match="took longer"):
        await fetch(f"http://{site}/slow", 100)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"),
        "2002:a00:1::",
    ],
)
async def test_addresses_that_are_not_public_are_never_called(address):
    assert not is_public(ipaddress.ip_address(address))
    named = HttpFetch(60.0, resolver=lambda: Names(address))
    literal = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidRequest, match="public address"):
        await named("http://images.example/a", 100)
    with pytest.raises(InvalidRequest, match="public address"):
        await HttpFetch(60.0)(f"http://{literal}/a", 100)


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "file:///etc/passwd", "http://", "http://u:p@a/", "x"]
)
async def test_an_invalid_url_is_rejected(url):
    with pytest.raises(InvalidRequest, match=r"URL of an image|not a valid address"):
        await HttpFetch(60.0)(url, 100)


@pytest.mark.parametrize(
    "host",
    [
        *("0x7f.1", "2130706433", "017700000001", "127.1", "0x7f000001", "127.0.0.1."),
        *("0177.0.0.1", "1.2.3.08", "１２７.1", "%31%32%37.1", "a.0x", "127.0.0.0x1.", "a..b"),
    ],
)
async def test_a_host_that_some_resolvers_parse_as_a_number_is_rejected(host):
    """Even if the address is public, and without resolving it."""
    fetch = HttpFetch(60.0, anywhere, lambda: Unasked("127.0.0.1"))
    with pytest.raises(InvalidRequest, match="is not a valid address"):
        await fetch(f"http://{host}/a", 100)


def test_public_addresses_are_recognized():
    for address in ("93.184.216.34", "2606:2800:220:1::1"):
        assert is_public(ipaddress.ip_address(address))


def test_all_images_of_a_request_must_fit_into_a_message():
    assert MAX_PIXEL_BYTES + 5 * (1 << 20) + (20 << 10) < MAX_MESSAGE_BYTES
