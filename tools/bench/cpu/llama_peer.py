"""llama.cpp as a peer of benchmarks: token ids in and out, with one sequence per stream.

    LLAMA_PYTHON tools/bench/cpu/llama_peer.py FILE.gguf

Runs in the Python that has `llama-cpp-python`, and imports nothing of this repository. Each line of
stdin is a load (JSON), and the response is a line on stdout. It batches like llama.cpp's own
server: one token of every running response, then prompt tokens up to the batch size. It is called
as a library without RPC and streaming, which is in its favour.
"""

import ctypes
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 2048  # tokens of one call, which llama.cpp splits into its compute batches


@dataclass(slots=True)
class Sequence:
    """One request in flight."""

    job: int
    prompt: list[int]
    max_tokens: int
    due: float
    num_computed: int = 0  # tokens whose KV is computed
    tokens: list[int] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)  # arrival time of each token

    def next_tokens(self, most: int) -> list[int]:
        if self.tokens:
            return self.tokens[-1:]
        return self.prompt[self.num_computed : self.num_computed + most]


class LlamaEngine:
    def __init__(self, file: str) -> None:
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # must live as long as the library
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            file.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {file}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._num_logits = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._context: Any = None

    def closed_loop(self, load: dict[str, Any]) -> dict[str, Any]:
        """Generate greedy responses in job order, `streams` at a time, with their times."""
        self._open(load["streams"], load["threads"], load["jobs"])
        waiting = list(enumerate(load["jobs"]))[::-1]
        slots: list[Sequence | None] = [None] * load["streams"]
        ended: dict[int, Sequence] = {}
        start, cpu = time.perf_counter(), time.process_time()
        while len(ended) < len(load["jobs"]):
            for number, slot in enumerate(slots):
                if slot is None and waiting:
                    job, (prompt, max_tokens, _) = waiting.pop()
                    slots[number] = Sequence(job, prompt, max_tokens, time.perf_counter() - start)
            for number, token in self._step(slots).items():
                slot = slots[number]
                assert slot is not None
                slot.tokens.append(token)
                slot.chunks.append(time.perf_counter() - start)
                if len(slot.tokens) == slot.max_tokens:
                    ended[slot.job], slots[number] = slot, None
                    memory = llama_cpp.llama_get_memory(self._context)
                    llama_cpp.llama_memory_seq_rm(memory, number, -1, -1)
        answers = [
            {"due": one.due, "chunks": one.chunks, "token_ids": one.tokens}
            for _, one in sorted(ended.items())
        ]
        return {"answers": answers, "cpu_s": time.process_time() - cpu}

    def _open(self, streams: int, threads: int, jobs: list[Any]) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        longest = max(len(prompt) + max_tokens for prompt, max_tokens, _ in jobs)
        wish = llama_cpp.llama_context_default_params()
        wish.n_seq_max = streams
        wish.n_ctx = streams * (-(-longest // 256) * 256)  # llama.cpp divides it by sequences
        wish.n_batch = _BATCH
        wish.n_threads = wish.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, wish)
        if not self._context:
            raise SystemExit("llama.cpp does not make a context")

    def _step(self, slots: list[Sequence | None]) -> dict[int, int]:
        """Compute one batch. Returns the new tokens by slot."""
        batch, sampled = self._batch, {}
        batch.n_tokens = 0
        running = [(number, slot) for number, slot in enumerate(slots) if slot is not None]
        for number, slot in sorted(running, key=lambda one: not one[1].tokens):
            for token in slot.next_tokens(_BATCH - batch.n_tokens):
                place = batch.n_tokens
                batch.token[place] = token
                batch.pos[place] = slot.num_computed
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = number
                slot.num_computed += 1
                last = slot.num_computed == len(slot.prompt) + len(slot.tokens)
                batch.logits[place] = last
                batch.n_tokens += 1
                if last:
                    sampled[number] = place
        if code := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama.cpp does not decode: {code}")
        return {number: self._best(place) for number, place in sampled.items()}

    def _best(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._num_logits,)).argmax())


def main() -> None:
    engine = LlamaEngine(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(engine.closed_loop(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
