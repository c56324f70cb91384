"""The sample request that shows that a system works: sent once, and printed as commands to try."""

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from cli import client, generate
from common import tls
from common.rpc import make_channel
from protos.router_pb2 import GenerateRequest, ScoreRequest
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling


@dataclass(frozen=True, slots=True)
class Key:
    """A key that the router accepts.

    Attributes:
        metadata: the key as gRPC metadata.
        shell: shell expression for the key, in commands to paste. "": the router needs none.
    """

    metadata: client.Metadata = ()
    shell: str = ""

    @property
    def header(self) -> str:
        """Return a header flag for curl and grpcurl, followed by a space, or ""."""
        return f'-H "Authorization: Bearer {self.shell}" ' if self.shell else ""

    @property
    def variable(self) -> str:
        """Return an environment variable to put before a `baton` command, or ""."""
        return f'{client.KEY_VARIABLE}="{self.shell}" ' if self.shell else ""


NO_KEY = Key()


_JSON = "-H 'Content-Type: application/json'"
_BESIDE_PYTHON = Path(sys.executable).with_name("baton")  # not in the shell's search path


def baton() -> str:
    """Return the `baton` command as a shell finds it."""
    return "baton" if shutil.which("baton") else shlex.quote(str(_BESIDE_PYTHON))


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion as the sample request.

    Attributes:
        router: gRPC address of the router.
        http: URL of its HTTP port.
        certificates, key: credentials for the call.
        model: name of the served model. Empty: the only one.
    """

    prompt: str
    router: str
    http: str
    certificates: tls.Certificates | None
    key: Key = NO_KEY
    model: str = ""

    async def ask(self) -> None:
        """Print the response. Raises grpc.aio.AioRpcError if there is none."""
        sampling = Sampling(max_tokens=32, temperature=0)
        request = GenerateRequest(text=self.prompt, sampling=sampling, model=self.model)
        await generate.print_answer(self.router, request, self.certificates, self.key.metadata)

    def commands(self) -> list[str]:
        """Return shell commands to paste, which send the same request."""
        ca = "" if self.certificates is None else self.certificates.config.ca
        model = f'"model":{json.dumps(self.model)},' if self.model else ""
        sampling = '"max_tokens":8,"temperature":0'
        ask = f'{{{model}"text":"{self.prompt}","sampling":{{{sampling}}}}}'
        body = f'{{{model}"prompt":"{self.prompt}",{sampling}}}'
        header = f"{self.key.header}{_JSON}"
        flag = f" --model {shlex.quote(self.model)}" if self.model else ""
        return [
            f"grpcurl {f'-cacert {ca}' if ca else '-plaintext'} {self.key.header}-d '{ask}' "
            f"{self.router} baton.v1.Router/Generate",
            f'{self.key.variable}{baton()} generate "{self.prompt}" --max-tokens 8 '
            f"--temperature 0 --router {self.router}{flag}" + (f" --tls-ca {ca}" if ca else ""),
            f"curl {f'--cacert {ca} ' if ca else ''}{self.http}/v1/completions {header} "
            f"-d '{body}'",
        ]


_ASK_S = 60.0


class VectorSample(Sample):
    """A score as the sample request, which all models without decode nodes support."""

    async def ask(self) -> None:
        """Print the score of the prompt with itself. Raises grpc.aio.AioRpcError."""
        request = ScoreRequest(queries=[self.prompt], documents=[self.prompt], model=self.model)
        async with make_channel(self.router, certificates=self.certificates) as channel:
            stub = RouterStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.Score(request, timeout=_ASK_S, metadata=self.key.metadata)
        print(f"with itself: {answer.scores[0]:.3f}")

    def commands(self) -> list[str]:
        ca = "" if self.certificates is None else self.certificates.config.ca
        curl = f"curl {f'--cacert {ca} ' if ca else ''}{self.http}"
        model = f'"model":{json.dumps(self.model)},' if self.model else ""
        rerank = f'{{{model}"query":"{self.prompt}","documents":["a time","a place"]}}'
        return [
            f"{curl}/v1/embeddings {self.key.header}{_JSON} "
            f'-d \'{{{model}"input":"{self.prompt}"}}\'',
            f"{curl}/v1/rerank {self.key.header}{_JSON} -d '{rerank}'",
        ]
