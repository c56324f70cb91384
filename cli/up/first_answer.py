"""A prompt that shows that a system answers: asked once, and told as commands to try."""

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cli import generate
from common import tls
from protos.router_pb2 import GenerateRequest
from protos.sampling_pb2 import Sampling


class FirstAnswer(Protocol):
    @property
    def prompt(self) -> str: ...

    @property
    def http(self) -> str:
        """URL of the router's HTTP port."""
        ...

    async def ask(self) -> None:
        """Prints the answer. Raises grpc.aio.AioRpcError where there is none."""
        ...

    def commands(self) -> list[str]:
        """To paste."""
        ...


_BESIDE_PYTHON = Path(sys.executable).with_name("baton")  # where no shell looks for it


@dataclass(frozen=True, slots=True)
class Sample:
    """
    Attributes:
        router: its address for gRPC.
        http: URL of its HTTP port.
        certificates: to ask it with.
    """

    prompt: str
    router: str
    http: str
    certificates: tls.Certificates | None

    async def ask(self) -> None:
        """Prints the answer. Raises grpc.aio.AioRpcError where there is none."""
        request = GenerateRequest(text=self.prompt, sampling=Sampling(max_tokens=32, temperature=0))
        await generate.print_answer(self.router, request, self.certificates)

    def commands(self) -> list[str]:
        """To paste."""
        ca = "" if self.certificates is None else self.certificates.config.ca
        baton = "baton" if shutil.which("baton") else shlex.quote(str(_BESIDE_PYTHON))
        ask = f'{{"text":"{self.prompt}","sampling":{{"max_tokens":8}}}}'
        body = f'{{"prompt":"{self.prompt}","max_tokens":8}}'
        json = "-H 'Content-Type: application/json'"
        return [
            f"grpcurl {f'-cacert {ca}' if ca else '-plaintext'} -d '{ask}' {self.router} "
            "baton.v1.Router/Generate",
            f'{baton} generate "{self.prompt}" --max-tokens 8 --router {self.router}'
            + (f" --tls-ca {ca}" if ca else ""),
            f"curl {f'--cacert {ca} ' if ca else ''}{self.http}/v1/completions {json} -d '{body}'",
        ]
