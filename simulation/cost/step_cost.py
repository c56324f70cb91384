"""The costs of a node: the duration of its steps and transfers, and the sizes of its model."""

from pathlib import Path
from typing import Protocol

import msgspec

from simulation.cost.gpus import GPUS
from simulation.cost.kernels import BYTES, TP_SIZES
from simulation.cost.kv_shape import KvShape
from simulation.cost.measured import BAND, MeasuredTimes, StepTable
from simulation.cost.modelled import ModelledTimes
from simulation.cost.models import model_shape
from simulation.cost.step_shape import StepShape

_MEMORY_SHARE = 0.9  # of a GPU, for weights and KV
_OTHER_BYTES = 3 << 30  # of a GPU, for activations, graphs and communication
_WIDE_BAND = 0.3  # of models with experts, whose tables differ, and with parts without tables
_SET_UP_S = 0.2e-3  # of a transfer
_HOST_BYTES_PER_S = 50e9  # between a GPU and host memory, over PCIe 5
_COPY_BYTES_PER_S = 10e9  # between two places of host memory
# Bytes/s of a node's port, and the share that transfers reach.
_PATHS = {
    "nvlink": 450e9 * 0.73,
    "rdma400": 50e9 * 0.73,
    "tcp100": 12.5e9 * 0.5,
    "tcp25": 3.1e9 * 0.5,
}
PATHS = tuple(_PATHS)


class StepTimes(Protocol):
    """The source of step times: a model of kernels, or a file of measurements."""

    def step_s(self, shape: StepShape) -> float: ...


class StepCost(msgspec.Struct, frozen=True):
    """The costs of one node.

    Attributes:
        kv: of all ranks, each head once.
        weight_bytes: of all ranks.
        kv_capacity_tokens: KV tokens that fit beside the weights, none of them outside a window.
        vocabulary: token ids of the model.
        context_length: maximum tokens of a request.
        band: relative error to expect of step_s.
        host_bytes_per_s: rate of copies between the device and host memory.
        has_drafts: whether step_s knows steps that verify drafts.
    """

    times: StepTimes
    kv: KvShape
    weight_bytes: int
    kv_capacity_tokens: int
    vocabulary: int
    context_length: int
    band: float
    host_bytes_per_s: float
    has_drafts: bool = True

    @staticmethod
    def of(gpu: str, model: str, tp: int = 1) -> "StepCost":
        """Return the costs of a model on `tp` GPUs of one kind.

        Args:
            gpu: name of a GPU, or a file of `baton bench steps`.
        Raises:
            ValueError: the GPU, the model or this number of ranks is not supported.
        """
        if gpu in GPUS:
            return _modelled(gpu, model, tp)
        if Path(gpu).is_file():
            return _measured(Path(gpu), model, tp)
        raise ValueError(
            f"gpu {gpu!r} is not supported: expected a file of `baton bench steps`, or one of "
            f"{', '.join(GPUS)}"
        )

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        return self.times.step_s(shape)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.kv.token_bytes

    def num_pages(self, page_size: int) -> int:
        """Return the pages that fit beside the weights."""
        return self.kv_capacity_tokens * self.kv.token_bytes // self.kv.page_bytes(page_size)

    def host_copy_s(self, num_bytes: int) -> float:
        """Return the seconds of a copy between the device and host memory."""
        return num_bytes / self.host_bytes_per_s

    def transfer_s(self, num_bytes: int, path: str) -> float:
        """Return the seconds of a transfer between two otherwise idle nodes.

        Raises:
            ValueError: `path` is not in PATHS.
        """
        if path not in _PATHS:
            raise ValueError(f"path {path!r} is not supported: expected one of {', '.join(PATHS)}")
        return _SET_UP_S + num_bytes / _PATHS[path]


def _modelled(gpu: str, model: str, tp: int) -> StepCost:
    if tp not in TP_SIZES:
        raise ValueError(f"tp {tp} is not supported: expected one of {TP_SIZES}")
    device, shape = GPUS[gpu], model_shape(model)
    if shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
        raise ValueError(
            f"tp {tp} does not divide the {shape.heads} heads and {shape.kv_heads} KV heads of "
            f"{model!r}"
        )
    kv = shape.kv.token_bytes
    weights = shape.parameters * BYTES
    copies = max(1, tp // shape.kv_heads)  # of each KV head
    free = tp * (int(_MEMORY_SHARE * device.sheet.memory_bytes) - _OTHER_BYTES) - weights
    if free < kv * copies:
        raise ValueError(
            f"model {model!r} does not fit on {tp} GPUs {gpu!r}: {weights / 2**30:.1f} GiB of "
            f"weights, {(free + weights) / 2**30:.1f} GiB of memory for them and KV"
        )
    is_usual = shape.kv.is_uniform and not shape.experts
    return StepCost(
        times=ModelledTimes(device, shape, tp),
        kv=shape.kv,
        weight_bytes=weights,
        kv_capacity_tokens=free // (kv * copies),
        vocabulary=shape.vocabulary,
        context_length=shape.context_length,
        band=max(device.band, 0.0 if is_usual else _WIDE_BAND),
        host_bytes_per_s=tp * _HOST_BYTES_PER_S,
    )


def _measured(file: Path, model: str, tp: int) -> StepCost:
    table = StepTable.read(file)
    if Path(model).name != table.model:
        raise ValueError(f"{file} has step times of model {table.model!r}, not of {model!r}")
    if tp != 1:
        raise ValueError(f"tp {tp} is not supported: {file} has step times of one rank")
    return StepCost(
        times=MeasuredTimes(table),
        kv=KvShape(table.kv_bytes_per_token, full=1),
        weight_bytes=table.weight_bytes,
        kv_capacity_tokens=table.kv_capacity_tokens,
        vocabulary=table.vocabulary,
        context_length=table.context_length,
        band=BAND,
        host_bytes_per_s=_COPY_BYTES_PER_S,
        has_drafts=False,
    )
