"""Compilation of this folder's C++ into a shared library.

A container image has prebuilt libraries for each level of processor (LEVELS). Elsewhere the first
start compiles the library for this processor and keeps it in the user's cache. A library's name
contains a hash of its sources and flags, so an outdated one is never loaded. Files are written
under a temporary name and renamed. If several processes start at once, one compiles and the others
wait.

    python -m kernels.cpu.compiler DIRECTORY      # prebuild all levels, for an image
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-mprefer-vector-width=512", "-pthread", "-fPIC", "-Wno-psabi")
COMPILERS = ("c++", "g++", "clang++")
PREBUILT = Path(sys.prefix) / "share" / "baton" / "kernels"  # libraries of a container image
DEADLINE_S = 600.0  # a compilation takes 40 s of a free core, and 140 s on a busy machine
_POLL_S = 0.1
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """A set of x86-64 processors that can run the same prebuilt library.

    Attributes:
        targets: compiler flags.
        features: names in the `flags` line of /proc/cpuinfo that a processor must have.
    """

    name: str
    targets: tuple[str, ...]
    features: frozenset[str]


_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = ("-march=x86-64-v4", "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_AMX = (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
LEVELS = (  # fastest first
    Level("amx", _AMX, _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}),
    Level("avx512-bf16", _BF16, _AVX512 | {"avx512_vnni", "avx512_bf16"}),
    Level("avx512-vnni", _VNNI, _AVX512 | {"avx512_vnni"}),
    Level("avx512", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
)


class NotCompiled(Exception):
    """The library could not be compiled: no compiler was found, it failed, or the cache is not
    writable. The message has the reason."""


def compiler() -> Path | None:
    """Return $CXX, or the first of COMPILERS in PATH."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found else None


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "baton" / "kernels"


def prebuilt(directory: Path = PREBUILT) -> Path | None:
    """Return the prebuilt library for the highest level that this processor has, if any."""
    features = set(_processor().split())
    for level in LEVELS:
        path = _prebuilt_path(directory, level)
        if level.features <= features and path.is_file():
            return path
    return None


def prebuild(directory: Path) -> None:
    """Compile the library for every level into `directory`.

    Raises:
        NotCompiled: see its description.
    """
    program = _require_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        _compile(program, level.targets, _prebuilt_path(directory, level))


def library(directory: Path, on_compile: Callable[[], None]) -> Path:
    """Return the library for this processor, from `directory` or compiled into it.

    Args:
        directory: writable only by this user. Created if missing.
        on_compile: called before a compilation, which may take minutes.
    Raises:
        NotCompiled: see its description.
    """
    program = _require_compiler()
    try:
        target = directory / f"{_key(program)}.so"
        if target.exists():
            return target
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(directory / "lock"):
            if not target.exists():
                on_compile()
                for interrupted in directory.glob(f"{target.stem}?*/"):  # of a killed process
                    shutil.rmtree(interrupted, ignore_errors=True)
                _compile(program, ("-march=native",), target)
    except OSError as error:
        raise NotCompiled(
            f"{directory}: {error}; set XDG_CACHE_HOME or HOME to a directory that can be written"
        ) from error
    return target


def _require_compiler() -> Path:
    program = compiler()
    if program is None:
        raise NotCompiled(f"no C++ compiler: install {' or '.join(COMPILERS)}, or set $CXX")
    return program


def _key(program: Path) -> str:
    """Return a name that depends on everything that determines the compiler's output and the
    processors that can run it."""
    return _digest((_said_by(program, "--version"), _processor()))


def _prebuilt_path(directory: Path, level: Level) -> Path:
    return directory / f"{level.name}-{_digest(level.targets)}.so"


def _digest(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (*FLAGS, *parts):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Return a description of the processor, as -march=native sees it. Different machines may share
    a home directory."""
    if not _CPUINFO.exists():
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    first = _CPUINFO.read_text().split("\n\n")[0]
    kept = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(kept))


def _said_by(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{program} took longer than {DEADLINE_S:.0f} s") from error
    if done.returncode:
        raise NotCompiled(f"{program} failed: {_first_error(done.stderr)}")
    return done.stdout


def _compile(program: Path, targets: Sequence[str], target: Path) -> None:
    """Compile the sources on all cores, because the first start waits for it, and link them."""
    sources = sorted(SOURCES.glob("*.cpp"))
    with TemporaryDirectory(dir=target.parent, prefix=target.stem) as directory:

        def compile_one(source: Path) -> str:
            unit = Path(directory, source.stem).with_suffix(".o")
            _said_by(program, *FLAGS, *targets, "-c", str(source), "-o", str(unit))
            return str(unit)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            units = list(pool.map(compile_one, sources))
        made = Path(directory, target.name)
        _said_by(program, "-shared", "-pthread", *units, "-o", str(made))
        made.replace(target)


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file. The system releases it however the process ends."""
    deadline = time.monotonic() + DEADLINE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise NotCompiled(f"the lock {path} was held for {DEADLINE_S:.0f} s") from error
                time.sleep(_POLL_S)
            else:
                break
        yield


if __name__ == "__main__":
    prebuild(Path(sys.argv[1]))
