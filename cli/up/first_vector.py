"""The sample request of a system without decode nodes: a score, which every model served there
supports."""

from dataclasses import dataclass

from cli.up.first_answer import NO_KEY, Key
from common import tls
from common.rpc import make_channel
from protos.router_pb2 import ScoreRequest
from protos.router_pb2_grpc import RouterStub

_ASK_S = 60.0


@dataclass(frozen=True, slots=True)
class VectorSample:
    """A score as the sample request. Has the attributes of Sample."""

    prompt: str
    router: str
    http: str
    certificates: tls.Certificates | None
    key: Key = NO_KEY

    async def ask(self) -> None:
        """Print the score of the prompt with itself. Raises grpc.aio.AioRpcError."""
        request = ScoreRequest(queries=[self.prompt], documents=[self.prompt])
        async with make_channel(self.router, certificates=self.certificates) as channel:
            stub = RouterStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.Score(request, timeout=_ASK_S, metadata=self.key.metadata)
        print(f"with itself: {answer.scores[0]:.3f}")

    def commands(self) -> list[str]:
        """Return commands to paste."""
        ca = "" if self.certificates is None else self.certificates.config.ca
        curl = f"curl {f'--cacert {ca} ' if ca else ''}{self.http}"
        json = "-H 'Content-Type: application/json'"
        rerank = f'{{"query":"{self.prompt}","documents":["a time","a place"]}}'
        return [
            f'{curl}/v1/embeddings {self.key.header}{json} -d \'{{"input":"{self.prompt}"}}\'',
            f"{curl}/v1/rerank {self.key.header}{json} -d '{rerank}'",
        ]
