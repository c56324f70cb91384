"""`baton generate`: sends a prompt to a router and streams the response to standard output."""

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from typing import Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToJson

from cli import client
from common import settings, tls
from common.errors import ConfigError
from protos.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, GenerateResponse
from protos.sampling_pb2 import Guide, Sampling

PROGRAM = "baton generate"
_READERS = {
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
}
_HELP = {
    "max_tokens": "maximum length of the response in tokens, from 1 (rest of the context)",
    "temperature": "sampling temperature. 0: always the most likely token (1.0)",
    "top_p": "sample among the most likely tokens of this total probability, above 0 (1.0: all)",
    "top_k": "sample among this many of the most likely tokens (-1: all)",
    "min_p": "minimum probability of a token, as a share of the most likely one's (0.0)",
    "seed": "random seed. The same seed gives the same response (drawn by the router)",
    "stop": "text that ends the response and is removed from it. Up to 16 times",
    "stop_regex": "regular expression. A match ends the response and is removed. Up to 16 times",
    "stop_token_ids": "token that ends the response. Up to 16 times",
    "ignore_eos": "continue after the model's end of text",
    "frequency_penalty": "penalty of a token for each time it was generated, -2 to 2 (0.0)",
    "presence_penalty": "penalty of tokens that were generated at all, -2 to 2 (0.0)",
    "repetition_penalty": "divisor of the scores of generated and prompt tokens, above 0 (1.0)",
    "min_tokens": "minimum length of the response in tokens (0)",
    "allowed_token_ids": "token that may be sampled, and no others. Up to 4096 times",
    "bad_words": "text that the response never contains. Up to 64 times",
    "thinking_budget": "reasoning tokens after which reasoning is ended (no limit)",
}
_FORMS = {
    "json_schema": "JSON schema that the response matches",
    "json_object": "the response is a JSON object",
    "regex": "regular expression that the response matches",
    "ebnf": "grammar that the response matches. Its first rule is root",
    "structural_tag": "structural tags of the response, in xgrammar's JSON",
}
_BASIC = ("max_tokens", "temperature", "seed", "stop")
# Fields that have other flags, and fields that are useless on a command line.
_OTHERWISE = frozenset(
    {
        "logit_bias",
        "guide",
        "bad_word_ids",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprobs_start",
        "hidden_states",
        "routed_experts",
        "thought",
    }
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
        return GenerateRequest(messages=messages, sampling=sampling, model=arguments.model)
    return GenerateRequest(text=text, sampling=sampling, model=arguments.model)


def parser() -> settings.ConfigArgumentParser:
    parser = settings.ConfigArgumentParser(
        prog=PROGRAM,
        description="Send a prompt to a router and stream the response.",
        epilog="Exits with 1 if there is no response.",
    )
    parser.add_argument("text", metavar="TEXT", help="prompt. - reads standard input")
    client.add_router_flag(parser)
    client.add_model_flag(parser)
    parser.add_argument("--chat", action="store_true", help="send TEXT as a user's message")
    parser.add_argument(
        "--stats", action="store_true", help="print token counts and times to standard error"
    )
    client.add_json_flag(parser)
    client.add_credential_flags(parser, secret=False)
    basic = parser.add_argument_group("sampling")
    more = parser.add_advanced_group("more sampling", "The router decides about unset fields.")
    for field in Sampling.DESCRIPTOR.fields:
        if field.name not in _OTHERWISE:
            group = basic if field.name in _BASIC else more
            _add_flag(group, field, _HELP[field.name])
    more.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="TOKEN=BIAS",
        help="bias of the score of a token, -100 to 100. Up to 1024 times",
    )
    forms = parser.add_advanced_group("structured output", "At most one of these.")
    one = forms.add_mutually_exclusive_group()
    for field in Guide.DESCRIPTOR.fields:
        _add_flag(one, field, _FORMS[field.name])
    return parser


def _add_flag(group: argparse._ActionsContainer, field: Any, help_: str) -> None:
    """Add a flag for `field`, a FieldDescriptor of any protobuf implementation."""
    flag = "--" + field.name.replace("_", "-")
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        group.add_argument(flag, action="store_true", default=None, help=help_)
        return
    read = _READERS[field.cpp_type]
    action = "append" if field.is_repeated else "store"
    group.add_argument(flag, type=read, action=action, metavar=read.__name__, help=help_)


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
    *,
    streams: bool = True,
) -> tuple[GenerateResponse, float]:
    """Receive a response.

    Args:
        streams: print its text as it arrives.

    Returns:
        The whole response as one message, and the seconds until its first part.
    """
    started, first = time.monotonic(), 0.0
    texts, thoughts, whole = [], [], GenerateResponse()
    async with aclosing(client.stream(address, request, certificates, metadata)) as answer:
        async for part in answer:
            first = first or time.monotonic() - started
            texts.append(part.text)
            thoughts.append(part.reasoning)
            whole.MergeFrom(part)  # appends token ids, and replaces texts
            if streams:
                print(part.text, end="", flush=True)
    if streams:
        print()
    whole.text, whole.reasoning = "".join(texts), "".join(thoughts)
    return whole, first


async def _main(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    try:
        certificates = client.certificates(arguments)
        whole, first = await print_answer(
            arguments.router,
            request_from(arguments),
            certificates,
            client.credentials(arguments),
            streams=not arguments.json,
        )
    except grpc.aio.AioRpcError as error:
        why = client.failure(error, arguments.router, client.key_source(arguments))
        print(f"{PROGRAM}: {why}", file=sys.stderr)
        return 1
    if arguments.json:
        print(MessageToJson(whole, preserving_proto_field_name=True))
    if arguments.stats:
        usage, took = whole.usage, time.monotonic() - started
        cached = f" ({usage.cached_tokens} cached)" if usage.HasField("cached_tokens") else ""
        print(
            f"{usage.prompt_tokens} prompt tokens{cached}, "
            f"{usage.completion_tokens} generated, finish reason {whole.finish_reason}, "
            f"TTFT {first * 1e3:.0f} ms, latency {took:.2f} s",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(_main(parser().parse_args())))
    # protobuf raises the first two for a number out of range.
    except (TypeError, ValueError, ConfigError) as error:
        settings.wrong(PROGRAM, str(error))
