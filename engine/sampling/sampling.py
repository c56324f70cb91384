"""Sampling parameters: columns by slot, and the part that a step sends to the device."""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch.batch import Ints
from engine.batch.request import Request
from kernels.sampling.sample import SamplingColumns

_MAX_SEED = 2**64 - 1


class SamplerFeature:
    """Sampling parameters of requests that are not greedy. A greedy request has temperature 0 and
    no other parameter.

    Engine thread only.
    """

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)

    def acquire(self, slot: int, request: Request) -> bool:
        """Assign a slot to the request. Return whether its tokens are drawn at random."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed & _MAX_SEED
        return not sampling.greedy

    def build(self, slots: NDArray[np.intp], positions: Ints) -> SamplingColumns:
        """Return the parameters of all rows of a step, in host memory.

        Args:
            positions: absolute index of the token that each row will sample.
        """
        return SamplingColumns(
            temperature=torch.from_numpy(self._temperature[slots]),
            top_k=torch.from_numpy(self._top_k[slots]),
            top_p=torch.from_numpy(self._top_p[slots]),
            min_p=torch.from_numpy(self._min_p[slots]),
            seeds=torch.from_numpy(self._seed[slots].view(np.int32).reshape(-1, 2)),
            positions=torch.from_numpy(positions),
        )

    def rehearsal(self, num_rows: int) -> SamplingColumns:
        """Return parameters of dummy rows with every filter enabled, for warm-up."""
        return SamplingColumns(
            temperature=torch.ones(num_rows),
            top_k=torch.full((num_rows,), 40, dtype=torch.int32),
            top_p=torch.full((num_rows,), 0.9),
            min_p=torch.full((num_rows,), 0.01),
            seeds=torch.zeros(num_rows, 2, dtype=torch.int32),
            positions=torch.zeros(num_rows, dtype=torch.int32),
        )
