"""The possible layouts of a number of GPUs: prefill and decode nodes, or colocated nodes."""

import shlex
from collections.abc import Collection, Iterator

import msgspec

from simulation.cost.models import MODELS

_CHUNKS = (512, 1024, 2048)
DEFAULT_ROWS = 256  # default of --engine.scheduler.max-running-requests


class Layout(msgspec.Struct, frozen=True):
    """Numbers and sizes of nodes.

    Attributes:
        prefill: number of prefill nodes. 0: the decode nodes also compute prompts.
        prefill_tp: GPUs of a prefill node. Without prefill nodes, GPUs of a decode node.
        chunk: prompt tokens in a step of colocated nodes. 0: not colocated.
    """

    prefill: int
    prefill_tp: int
    decode: int
    decode_tp: int
    chunk: int = 0

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp

    @property
    def name(self) -> str:
        if self.chunk:
            return f"{_nodes(self.decode, self.decode_tp)} colocated, chunks of {self.chunk}"
        prefill = _nodes(self.prefill, self.prefill_tp)
        return f"{prefill} prefill + {_nodes(self.decode, self.decode_tp)} decode"

    def command(self, model: str, rows: float) -> str:
        """Return the command that starts this layout.

        Args:
            model: directory. The name of a model of the cost model becomes DIR.
            rows: running requests of a node for which slots are needed.
        """
        directory = "DIR" if model in MODELS else shlex.quote(model)
        words = ["baton up", f"--model {directory}"]
        words += [f"--prefill {self.prefill}", f"--decode {self.decode}"]
        if self.prefill and self.prefill_tp > 1:
            words.append(f"--prefill-tp {self.prefill_tp}")
        if self.decode_tp > 1:
            words.append(f"--decode-tp {self.decode_tp}")
        if self.chunk:
            words.append(f"--engine.scheduler.chunked-prefill-tokens {self.chunk}")
        if rows > DEFAULT_ROWS:
            words.append(f"--engine.scheduler.max-running-requests {round(rows)}")
        return " ".join(words)


def layouts(gpus: int, sizes: Collection[int]) -> Iterator[Layout]:
    """Yield all layouts that leave no GPUs for another node.

    Args:
        sizes: numbers of GPUs that a node may have.
    """
    for decode_tp in sizes:
        for chunk in _CHUNKS if decode_tp <= gpus else ():
            yield Layout(0, decode_tp, gpus // decode_tp, decode_tp, chunk)
        for prefill_tp in sizes:
            for prefill in range(1, gpus // prefill_tp + 1):
                left = gpus - prefill * prefill_tp
                if left >= decode_tp and left % decode_tp < min(prefill_tp, decode_tp):
                    yield Layout(prefill, prefill_tp, left // decode_tp, decode_tp)


def _nodes(count: int, tp: int) -> str:
    return f"{count} x TP{tp}" if tp > 1 else str(count)
