"""The sample request of `baton up` while the router's processes learn the nodes."""

from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from cli.up.__main__ import StartFailed, ask
from cli.up.first_answer import Sample


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details="no node")


@dataclass(frozen=True, slots=True)
class Failing(Sample):
    """Fails with these codes, one after the other, and then succeeds."""

    codes: list[grpc.StatusCode] = field(default_factory=list)

    async def ask(self) -> None:
        if self.codes:
            raise failure(self.codes.pop(0))


def sample(*codes: grpc.StatusCode) -> Failing:
    return Failing("Hello", "127.0.0.1:1", "http://127.0.0.1:2", None, codes=list(codes))


async def test_the_request_is_repeated_while_a_process_knows_no_nodes():
    asked = sample(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE)
    await ask(asked)
    assert not asked.codes


@pytest.mark.parametrize(
    "code, settle_s", [(grpc.StatusCode.UNAVAILABLE, 0.0), (grpc.StatusCode.INTERNAL, 60.0)]
)
async def test_other_failures_end_the_start(code: grpc.StatusCode, settle_s: float):
    asked = sample(code, code)
    with pytest.raises(StartFailed, match=f"{code.name} no node"):
        await ask(asked, settle_s)
    assert asked.codes == [code]
