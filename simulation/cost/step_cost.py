"""The costs of a node: the duration of its steps and transfers, and the sizes of its model."""

from pathlib import Path
from typing import Protocol

import msgspec

from simulation.cost.gpus import GPUS
from simulation.cost.kernels import BYTES, TP_SIZES
from simulation.cost.measured import BAND, MeasuredTimes, StepTable
from simulation.cost.modelled import ModelledTimes
from simulation.cost.models import model_shape
from simulation.cost.step_shape import StepShape

_MEMORY_SHARE = 0.9  # of a GPU, for weights and KV
_OTHER_BYTES = 3 << 30  # of a GPU, for activations, graphs and communication
_EXPERTS_BAND = 0.3  # of models with experts: the tables of frameworks differ
_SET_UP_S = 0.2e-3  # of a transfer
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
        kv_bytes_per_token: in all layers of all ranks, each head once.
        weight_bytes: of all ranks.
        kv_capacity_tokens: KV tokens that fit beside the weights.
        vocabulary: token ids of the model.
        context_length: maximum tokens of a request.
        band: relative error to expect of step_s.
    """

    times: StepTimes
    kv_bytes_per_token: int
    weight_bytes: int
    kv_capacity_tokens: int
    vocabulary: int
    context_length: int
    band: float

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
    kv = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES
    weights = shape.parameters * BYTES
    copies = max(1, tp // shape.kv_heads)  # of each KV head
    free = tp * (int(_MEMORY_SHARE * device.sheet.memory_bytes) - _OTHER_BYTES) - weights
    if free < kv * copies:
        raise ValueError(
            f"model {model!r} does not fit on {tp} GPUs {gpu!r}: {weights / 2**30:.1f} GiB of "
            f"weights, {(free + weights) / 2**30:.1f} GiB of memory for them and KV"
        )
    return StepCost(
        times=ModelledTimes(device, shape, tp),
        kv_bytes_per_token=kv,
        weight_bytes=weights,
        kv_capacity_tokens=free // (kv * copies),
        vocabulary=shape.vocabulary,
        context_length=shape.context_length,
        band=max(device.band, _EXPERTS_BAND if shape.experts else 0.0),
    )


def _measured(file: Path, model: str, tp: int) -> StepCost:
    table = StepTable.read(file)
    if Path(model).name != table.model:
        raise ValueError(f"{file} has step times of model {table.model!r}, not of {model!r}")
    if tp != 1:
        raise ValueError(f"tp {tp} is not supported: {file} has step times of one rank")
    return StepCost(
        times=MeasuredTimes(table),
        kv_bytes_per_token=table.kv_bytes_per_token,
        weight_bytes=table.weight_bytes,
        kv_capacity_tokens=table.kv_capacity_tokens,
        vocabulary=table.vocabulary,
        context_length=table.context_length,
        band=BAND,
    )
