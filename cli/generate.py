"""baton generate TEXT: sends one prompt to a router and streams the answer to standard output."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor

from cli import client
from common import settings, tls
from common.errors import ConfigError
from protos.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, GenerateResponse
from protos.sampling_pb2 import Guide, Sampling

_READERS = {
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
}
_HELP = {
    "max_tokens": "longest answer, from 1 (what the context leaves); more than fits is refused",
    "temperature": "0: always the likeliest token; above: more variety (1.0)",
    "top_p": "draw among the likeliest tokens of so much probability, above 0 (1.0: all)",
    "top_k": "draw among so many of the likeliest tokens (-1: all)",
    "min_p": "leave out tokens below this share of the likeliest one's probability (0.0)",
    "seed": "the same one gives the same answer (drawn by the router)",
    "stop": "text that ends the answer and is cut off it; up to 16 times",
    "stop_regex": "expression: text that matches ends the answer and is cut off; up to 16 times",
    "stop_token_ids": "token that ends the answer; up to 16 times",
    "ignore_eos": "go on after the model's own end of text",
    "frequency_penalty": "against a token for each time it has been said, -2 to 2 (0.0)",
    "presence_penalty": "against tokens that have been said at all, -2 to 2 (0.0)",
    "repetition_penalty": "divides scores of tokens said or in the prompt, above 0 (1.0)",
    "min_tokens": "so many before anything ends the answer (0)",
    "allowed_token_ids": "token that may be sampled, and none but these; up to 4096 times",
    "bad_words": "text that the answer never completes; up to 64 times",
    "thinking_budget": "tokens of thought after which it is ended (any)",
}
_FORMS = {
    "json_schema": "the answer is JSON of this schema",
    "json_object": "the answer is JSON",
    "regex": "the answer matches this expression",
    "ebnf": "the answer is a word of this grammar, whose rule root is the first",
    "structural_tag": "the answer has these forms in its text: JSON, as xgrammar has it",
}
# Fields with flags of their own, and fields for programs: token ids, and data beside the text.
_OTHERWISE = frozenset(
    {"logit_bias", "guide", "bad_word_ids", "logprobs", "prompt_logprobs", "thought"}
)


def request_from(arguments: argparse.Namespace) -> GenerateRequest:
    given = {name: getattr(arguments, name) for name in _HELP}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    sampling.logit_bias.update(arguments.logit_bias or ())
    for form in _FORMS:
        if (value := getattr(arguments, form)) is not None:
            setattr(sampling.guide, form, value)
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    if arguments.chat:
        messages = ChatMessages(messages=[ChatMessage(role="user", content=text)])
        return GenerateRequest(messages=messages, sampling=sampling)
    return GenerateRequest(text=text, sampling=sampling)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(prog="baton generate", description=__doc__)
    parser.add_argument("text", metavar="TEXT", help="the prompt; - reads standard input")
    client.add_router_flag(parser)
    parser.add_argument("--chat", action="store_true", help="TEXT is a user's message")
    parser.add_argument("--stats", action="store_true", help="tokens and times, to standard error")
    client.add_key_flag(parser)
    client.add_tls_flags(parser)
    group = parser.add_argument_group("sampling", "Unset: what the router takes for unset fields.")
    for field in Sampling.DESCRIPTOR.fields:
        if field.name not in _OTHERWISE:
            _add_flag(group, field, _HELP[field.name])
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="TOKEN=BIAS",
        help="added to the score of a token, -100 to 100; up to 1024 times",
    )
    forms = parser.add_argument_group("form", "At most one of these.")
    one = forms.add_mutually_exclusive_group()
    for field in Guide.DESCRIPTOR.fields:
        _add_flag(one, field, _FORMS[field.name])
    return parser.parse_args(arguments)


def _add_flag(group: argparse._ActionsContainer, field: Any, told: str) -> None:
    """Add a flag for `field`, a FieldDescriptor of any protobuf implementation."""
    flag = "--" + field.name.replace("_", "-")
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        group.add_argument(flag, action="store_true", default=None, help=told)
        return
    read = _READERS[field.cpp_type]
    action = "append" if field.is_repeated else "store"
    group.add_argument(flag, type=read, action=action, metavar=read.__name__, help=told)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN=BIAS, as in 5=-2.5") from None


async def print_answer(
    address: str,
    request: GenerateRequest,
    certificates: tls.Certificates | None = None,
    metadata: client.Metadata = (),
) -> tuple[GenerateResponse, float]:
    """Stream the response text to standard output.

    Returns:
        The last message, and the seconds until the first one.
    """
    started, first = time.monotonic(), 0.0
    last = GenerateResponse()
    async with aclosing(client.stream(address, request, certificates, metadata)) as answer:
        async for last in answer:
            first = first or time.monotonic() - started
            print(last.text, end="", flush=True)
    print()
    return last, first


async def _main(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        certificates = client.certificates(arguments)
        last, first = await print_answer(
            arguments.router, request_from(arguments), certificates, client.credentials(arguments)
        )
    except grpc.aio.AioRpcError as error:
        why = client.failure(error, client.key_source(arguments))
        print(f"baton generate: {why}", file=sys.stderr)
        return 1
    if arguments.stats:
        usage, took = last.usage, time.monotonic() - started
        cached = f" ({usage.cached_tokens} cached)" if usage.HasField("cached_tokens") else ""
        print(
            f"{usage.prompt_tokens} prompt tokens{cached}, "
            f"{usage.completion_tokens} generated, finished by {last.finish_reason}; "
            f"first after {first * 1e3:.0f} ms, all after {took:.2f} s",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(_main(parse())))
    # protobuf raises the first two for a number out of range.
    except (TypeError, ValueError, ConfigError) as error:
        print(f"baton generate: {error}", file=sys.stderr)
        sys.exit(2)
