"""`baton requests show` with a router and nodes that are real processes."""

import json
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from tests.support.network.http_client import get
from tests.support.processes.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LABEL = "the client's own name"
PROMPT = list(range(100))


async def test_a_request_is_explained_by_all_its_processes(make: Callable[..., Cluster]):
    """By its client's name and by its id, as text and as JSON, over gRPC and HTTP."""
    async with make() as cluster:
        await cluster.generate(PROMPT, max_tokens=4, request_id=LABEL, ignore_eos=True)
        await cluster.until_nothing_is_held()  # reports are published at the end
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        said = await cluster.baton("requests show", LABEL)
        assert (said.returncode, said.stderr) == (0, "")
        assert f"called {LABEL}" in said.stdout and "length after" in said.stdout
        for place in ("router", f"decode {decode.address}", f"prefill {prefill.address}"):
            assert f"  {place} " in said.stdout
        reported = json.loads((await cluster.baton("requests show", LABEL, "--json")).stdout)
        moments = [event.get("at_s", 0.0) for event in reported["events"]]
        assert moments == sorted(moments)
        here = [event["event"]["what"] for event in reported["events"] if not event["node"]]
        assert here == ["arrived", "tokenized", "placed", "first token", "last token", "ended"]
        there = [e["event"]["what"] for e in reported["events"] if e["where"] == "prefill"]
        assert there == ["opened", "granted", "prefills", "computed", "released"]
        by_id = (await get(cluster.http_port, f"/requests/{reported['request_id']}/events")).json
        assert by_id["label"] == LABEL
        assert sorted(e["event"]["what"] for e in by_id["events"]) == sorted(
            e["event"]["what"] for e in reported["events"]
        )
        unknown = await get(cluster.http_port, "/requests/unknown/events")
        assert unknown.status == 404
        words = unknown.json["error"]["message"]
        assert "'unknown'" in words and f"prefill {prefill.address} its last 1" in words
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.explain("unknown")
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, words)
        said = await cluster.baton("requests show", "unknown")
        assert (said.returncode, said.stdout) == (1, "")
        assert said.stderr == f"baton requests show: {cluster.address}: NOT_FOUND: {words}\n"
