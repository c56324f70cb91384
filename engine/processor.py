"""Number formats that this machine's processor multiplies natively, as reported by the kernel. Does
not import torch."""

from pathlib import Path

# Flags in /proc/cpuinfo on x86 and ARM. i8mm multiplies int8, the other names are self-explanatory.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
INT8 = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "i8mm"})


def matrix_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return those of BFLOAT16 and INT8 that the first core of `cpuinfo` has, sorted."""
    for line in cpuinfo.read_text().splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted((BFLOAT16 | INT8) & set(features.split())))
    return ()
