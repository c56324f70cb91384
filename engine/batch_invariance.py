"""`engine.batch_invariant`: unsupported settings, computation in this mode, and its self-test.

In this mode, the bits of a request's tokens and logprobs do not depend on other requests. A node
that cannot guarantee this does not start.

A GPU must first pass `python -m tools.bench.gpu --parts compile bits`, which compares rows alone
with the same rows in batches. If no bit differs, it records the GPU in a file in the user's cache.
The file's name depends on everything that can change the bits. A record is therefore valid only for
the same kind of GPU, kernels and releases of torch and Triton.
"""

import functools
import hashlib
import logging
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch
import triton

import kernels
from common.config import EngineConfig
from common.errors import ConfigError
from common.logs import kv
from engine.kv_cache.layout import KVLayout
from engine.models import LoadableModel, Model
from engine.models.blocks.layer import Layer
from engine.models.linear import INT8
from engine.models.probe import PRODUCTS, differing_operation
from kernels import device as devices
from kernels.cpu.compiler import cache_directory

_SETTING = "engine.batch_invariant"

log = logging.getLogger(__name__)


def check(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, loadable: LoadableModel
) -> None:
    """Raise ConfigError if this process cannot guarantee batch invariance for the model."""
    parallel = config.parallel
    for problem, found in {
        "stages and data-parallel groups are not supported: set engine.parallel.pp and dp to 1": (
            parallel.pp * parallel.dp > 1
        ),
        "ranks with whole experts are not supported: set engine.parallel.experts to tp": (
            parallel.tp > 1 and parallel.experts == "ep"
        ),
        "only ranks that share memory add in a fixed order: set engine.parallel.collectives to "
        "auto and hosts to 1": (
            parallel.tp > 1 and (parallel.collectives == "gloo" or parallel.hosts > 1)
        ),
        "ranks of a model that the Transformers library computes are not supported: set "
        "engine.parallel.tp to 1": parallel.tp > 1 and loadable.backend != "native",
        "models with images are not supported: serve a model of text": (
            loadable.spec.image_token_side > 0
        ),
    }.items():
        if found:
            raise ConfigError(f"{_SETTING}: {problem}")
    if device.type == "cpu":
        _check_kernels(config, dtype, loadable)
    else:
        _check_gpu(config, device, loadable)


def _check_gpu(config: EngineConfig, device: torch.device, loadable: LoadableModel) -> None:
    for problem, found in {
        "ranks on GPUs add in an order that NCCL chooses: set engine.parallel.tp to 1": (
            config.parallel.tp > 1
        ),
        "models of the Transformers library are not supported on GPUs": (
            loadable.backend != "native"
        ),
        "models with recurrent states are not supported on GPUs": any(
            layer.cells for layer in loadable.spec.layers
        ),
        "this GPU has not been verified with these kernels and these releases of torch "
        "and Triton: run python -m tools.bench.gpu --parts compile bits": (not has_passed(device)),
    }.items():
        if found:
            raise ConfigError(f"{_SETTING}: {problem}, or set engine.device to cpu")


def _check_kernels(config: EngineConfig, dtype: torch.dtype, loadable: LoadableModel) -> None:
    operators = devices.compiled_for(torch.device("cpu"))
    if operators is None:
        remedy = (
            "set engine.cpu_kernels to auto"
            if config.cpu_kernels == "off"
            else "install a C++ compiler, or use the container image"
        )
        raise ConfigError(f"{_SETTING} needs the compiled CPU kernels: {remedy}")
    int8 = config.quantize == "int8" or loadable.spec.format == INT8
    for needed in (dtype, torch.int8) if int8 else (dtype,):
        if not operators.multiplies(needed):
            names = [
                str(each).removeprefix("torch.")
                for each in (torch.float32, torch.bfloat16)
                if operators.multiplies(each)
            ]
            remedy = f"set engine.dtype to {' or '.join(names)}" if names else "use one with AVX512"
            raise ConfigError(
                f"{_SETTING}: the compiled kernels do not multiply "
                f"{str(needed).removeprefix('torch.')} on this processor, and other products "
                f"depend on the batch: {remedy}"
            )


def keep(model: Model, layout: KVLayout) -> None:
    """Make a loaded model compute each token in one way, and test it. All ranks of a node call this
    at the same time.

    Args:
        layout: layout of this rank's pages.
    Raises:
        ConfigError: the model has unsupported layers, or an operation gives other bits in another
            batch.
    """
    name = model.spec.architecture
    if not all(map(_is_supported, model.layers)):
        raise ConfigError(
            f"{_SETTING}: {name} has layers that are not supported: serve a model of another family"
        )
    model.compute_in_one_way()
    if not model.spec.generates:
        raise ConfigError(f"{_SETTING}: {name} generates no tokens: unset it for this model")
    start = time.monotonic()
    if operation := differing_operation(model, layout):
        raise ConfigError(
            f"{_SETTING}: results of {name} depend on the batch, first those of {operation}: "
            "unset it, and report this as a bug"
        )
    log.info("batch invariance probed %s", kv(seconds=f"{time.monotonic() - start:.2f}"))


def _is_supported(layer: Layer) -> bool:
    return {type(layer.mixer), type(layer.ffn)} <= PRODUCTS.keys()


def arithmetic(ranks: int, backend: str, device: torch.device) -> str:
    """Return a name for the arithmetic of a node. Nodes with the same name compute the same bits.

    Args:
        ranks: number of ranks whose outputs are summed per layer.
        backend: backend of the model, see LoadableModel.
    """
    if device.type != "cpu":
        return gpu_arithmetic(device)
    operators = devices.compiled_for(torch.device("cpu"))
    return " ".join(
        (
            "torch" if operators is None else operators.name,
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            "-".join(platform.libc_ver()),
            *([f"tp{ranks}"] if ranks > 1 else []),
            *([f"{backend} {version(backend)}"] if backend != "native" else []),
        )
    )


def gpu_arithmetic(device: torch.device) -> str:
    """Return a name for everything that determines the bits on a GPU: its kind, the kernels, and
    the releases of torch and Triton."""
    major, minor = torch.cuda.get_device_capability(device)
    return " ".join(
        (
            torch.cuda.get_device_name(device),
            f"sm_{major}{minor}",
            f"triton {triton.__version__}",
            f"torch {torch.__version__}",
            f"kernels {_sources()}",
        )
    )


def has_passed(device: torch.device) -> bool:
    """Return whether this GPU has passed the comparison."""
    return _record(gpu_arithmetic(device)).is_file()


def record(device: torch.device, *, passed: bool) -> Path:
    """Record the result of a comparison on this GPU. Return the path of the record. A failure
    removes an earlier record."""
    name = gpu_arithmetic(device)
    path = _record(name)
    if passed:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    else:
        path.unlink(missing_ok=True)
    return path


def _record(name: str) -> Path:
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return cache_directory().with_name("equal-bits") / digest


@functools.cache
def _sources() -> str:
    """Return a hash of the sources of all Triton kernels."""
    root, found = Path(kernels.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]
