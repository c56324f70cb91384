"""Records of GPUs that have passed the comparison of bits, which `engine.batch_invariant` requires.

`python -m tools.bench.gpu --parts compile bits` compares rows alone with the same rows in batches.
If no bit differs, it records the GPU as a file in the user's cache. The file's name depends on
everything that can change the bits. A record is therefore valid only for this kind of GPU, these
kernels and these releases of torch and Triton.
"""

import functools
import hashlib
from pathlib import Path

import torch
import triton

import kernels
from kernels.cpu.compiler import cache_directory


def computes_as(device: torch.device) -> str:
    """Return a name for everything that determines the bits of a GPU: its kind, the kernels, and
    the releases of torch and Triton. GPUs with equal names compute equal bits."""
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
    """Return whether the comparison has passed on this GPU."""
    return _record(computes_as(device)).is_file()


def record(device: torch.device, *, passed: bool) -> Path:
    """Record the result of a comparison on this GPU, and return the record's path. A failure
    removes an earlier record."""
    name = computes_as(device)
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
