"""baton explain REQUEST: what happened to one request, on the router and on all nodes, in the order
of time.

REQUEST is its id, or what its client called it (X-Request-Id): then the newest one that is called
so. Of requests that have ended the router and each node keep the last ones, those that failed
longer.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence

import grpc.aio
from google.protobuf.json_format import MessageToJson

from cli import client
from cli.top.frame import safe
from common import rpc, settings, tls
from common.errors import ConfigError
from common.process.standard_output import say
from protos.router_pb2 import ExplainRequest, ExplainResponse
from protos.router_pb2_grpc import RouterStub

ANSWER_S = 10.0  # the router allows its nodes 2 s
EXIT_NO_ANSWER = 1
EXIT_USAGE = 2


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = settings.ConfigArgumentParser(
        prog="baton explain",
        description=__doc__,
        epilog=f"Exits with {EXIT_NO_ANSWER} if nobody knows the request, or no router answers.",
    )
    parser.add_argument("request", metavar="REQUEST", help="its id, or its client's name for it")
    client.add_router_flag(parser)
    parser.add_argument("--json", action="store_true", help="the router's answer, as JSON")
    client.add_key_flag(parser)
    client.add_tls_flags(parser)
    return parser.parse_args(arguments)


def text(told: ExplainResponse) -> str:
    """Return the events as text. `took` is the time since the same process's previous event."""
    return "\n".join((*_head(told), "", *_events(told), *_silent(told)))


def _head(told: ExplainResponse) -> Iterator[str]:
    label = f"  called {safe(told.label)}" if told.label else ""
    yield f"request {safe(told.request_id)}{label}"
    if not told.outcome:
        yield "  the router knows nothing of it any more; times are since the first node had it"
        return
    yield (
        f"  {safe(told.outcome)} after {told.seconds:.3f} s: "
        f"{told.prompt_tokens} prompt tokens ({told.cached_tokens} cached), "
        f"{told.completion_tokens} generated"
    )
    if told.error:
        yield f"  {safe(told.error)}"


def _events(told: ExplainResponse) -> Iterator[str]:
    places = [f"{each.where} {each.node}".strip() for each in told.events]
    width = max(map(len, places), default=0)
    yield f"{'at':>10} {'took':>9}  {'where':<{width}}  what"
    before: dict[str, float] = {}
    for place, each in zip(places, told.events, strict=True):
        took = f"{each.at_s - before[place]:9.3f}" if place in before else " " * 9
        before[place] = each.at_s
        what = f"{each.event.what}: {each.event.detail}" if each.event.detail else each.event.what
        yield f"{each.at_s:10.3f} {took}  {safe(place):<{width}}  {safe(what)}"


def _silent(told: ExplainResponse) -> Iterator[str]:
    """Name the nodes that may have taken part but did not respond."""
    for node in told.nodes:
        if node.problem:
            yield f"{safe(node.role)} {safe(node.address)} has not answered: {safe(node.problem)}"


async def _main(
    options: argparse.Namespace, certificates: tls.Certificates | None, metadata: client.Metadata
) -> int:
    async with rpc.make_channel(options.router, certificates) as channel:
        stub = RouterStub(channel)  # type: ignore[no-untyped-call]
        try:
            request = ExplainRequest(name=options.request)
            told = await stub.Explain(request, timeout=ANSWER_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            why = client.failure(error, client.key_source(options))
            print(f"baton explain: {why}", file=sys.stderr)
            return EXIT_NO_ANSWER
    say(MessageToJson(told, preserving_proto_field_name=True) if options.json else text(told))
    return 0


if __name__ == "__main__":
    options = parse()
    try:
        metadata = client.credentials(options)
        sys.exit(asyncio.run(_main(options, client.certificates(options), metadata)))
    except ConfigError as error:
        print(f"baton explain: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
