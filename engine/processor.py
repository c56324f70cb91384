"""What this machine's processor multiplies natively, as its kernel tells. Knows no torch."""

from pathlib import Path

# As /proc/cpuinfo calls them, on x86 and on ARM; i8mm multiplies int8, the others say what they do.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
INT8 = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "i8mm"})


def matrix_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of BFLOAT16 and INT8 that the first core of `cpuinfo` has, sorted."""
    for line in cpuinfo.read_text().splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted((BFLOAT16 | INT8) & set(features.split())))
    return ()
