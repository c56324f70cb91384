"""Lower bound of a step's time: memory bandwidth and arithmetic throughput of all cores."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_TRIES = 4
_ABSENT = 77  # a byte that the buffer does not contain
PRODUCT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Floor:
    read_bytes_per_s: float
    product_flops_per_s: float  # bfloat16 products of PRODUCT_ROWS rows by oneDNN

    def step_s(self, read_bytes: int) -> float:
        """Return the minimum seconds of a step that reads `read_bytes` bytes."""
        return read_bytes / self.read_bytes_per_s

    def product_s(self, flops: float) -> float:
        return flops / self.product_flops_per_s


def measured(read_bytes: int, sizes: dict[str, Any]) -> Floor:
    """Measure the bandwidth and throughput.

    Args:
        read_bytes: size of the buffer to read, many times the CPU caches.
        sizes: sizes of the model whose layers are multiplied.
    """
    return Floor(_read_rate(read_bytes), _product_rate(sizes))


def matrices(sizes: dict[str, Any]) -> list[tuple[int, int]]:
    """Return [out, in] of a layer's products. Products with the same input count as one."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    return [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def product_flops(sizes: dict[str, Any], rows: int) -> float:
    """Return the FLOPs of the products of all layers, without the head, which has one row only."""
    each = sum(out * into for out, into in matrices(sizes))
    return 2.0 * rows * each * int(sizes["num_hidden_layers"])


def kv_bytes_per_token(sizes: dict[str, Any], itemsize: int) -> int:
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    return int(2 * keys * sizes["num_hidden_layers"] * itemsize)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _read_rate(num_bytes: int) -> float:
    """Measure the read rate with libc's search for an absent byte, which only reads."""
    buffer, part = torch.zeros(num_bytes, dtype=torch.uint8), num_bytes // _cores()
    find = ctypes.CDLL(None).memchr
    find.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    find.restype = ctypes.c_void_p

    def read() -> None:
        threads = [
            threading.Thread(target=find, args=(buffer.data_ptr() + core * part, _ABSENT, part))
            for core in range(_cores())
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return part * _cores() / _least_s(read)


def _product_rate(sizes: dict[str, Any]) -> float:
    """Measure products with the weights of all layers, each of which is read from memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(_cores())
    layers = [
        [torch.ones(shape, dtype=torch.bfloat16) for shape in matrices(sizes)]
        for _ in range(sizes["num_hidden_layers"])
    ]
    inputs = [torch.ones(PRODUCT_ROWS, into, dtype=torch.bfloat16) for _, into in matrices(sizes)]

    def multiply() -> None:
        for weights in layers:
            for given, weight in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(given, weight)

    try:
        return product_flops(sizes, PRODUCT_ROWS) / _least_s(multiply)
    finally:
        torch.set_num_threads(threads)


def _least_s(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
