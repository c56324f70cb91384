"""Compilation for the present CPU: once, completely or not at all, and without ending the
process."""

import logging
import os
import stat
import threading

import pytest
import torch

from common.errors import ConfigError
from engine.runner import cpu
from engine.runner.cpu import use_cpu
from kernels import device
from kernels.cpu import compiler
from kernels.cpu.compiler import NotCompiled, library

SCRIPT = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
--version) echo some compiler 1.0; exit 0 ;;
esac
{failure}
while [ $# -gt 1 ]; do shift; done
echo compiled > "$1"
"""


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Make a compiler that writes its output or fails. Return the file with its calls."""
    calls = tmp_path / "calls"

    def make(failure=""):
        program = tmp_path / "compiler"
        program.write_text(SCRIPT.format(calls=calls, failure=failure))
        program.chmod(0o700)
        monkeypatch.setenv("CXX", str(program))
        return calls

    return make


def _links(calls):
    return sum("-shared" in line for line in calls.read_text().splitlines())


def test_a_compiled_library_is_reused(fake_compiler, tmp_path):
    calls = fake_compiler()
    told = []
    path = library(tmp_path / "cache", lambda: told.append(1))
    assert path.read_text() == "compiled\n"
    assert library(tmp_path / "cache", lambda: told.append(2)) == path
    assert (told, _links(calls)) == ([1], 1)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {path.name, "lock"}


def test_of_processes_that_start_at_once_one_compiles(fake_compiler, tmp_path):
    calls = fake_compiler()
    paths = []
    start = threading.Barrier(4)

    def open_library():
        start.wait()
        paths.append(library(tmp_path / "cache", lambda: None))

    threads = [threading.Thread(target=open_library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1
    assert _links(calls) == 1


def test_another_processor_compiler_or_source_gives_another_library(
    fake_compiler, tmp_path, monkeypatch
):
    fake_compiler()
    paths = [library(tmp_path / "cache", lambda: None)]
    with monkeypatch.context() as changed:
        changed.setattr(compiler, "_processor", lambda: "another")
        paths.append(library(tmp_path / "cache", lambda: None))
    fake_compiler("# unlike it")
    program = tmp_path / "compiler"
    program.write_text(program.read_text().replace("1.0", "1.1"))
    paths.append(library(tmp_path / "cache", lambda: None))
    assert len(set(paths)) == 3


@pytest.mark.parametrize(
    "failure, words",
    [
        ("echo 'x.cpp:1: error: what is this?' >&2; exit 1", "what is this"),
        ("kill -9 $$", "failed"),
    ],
)
def test_a_compiler_that_fails_leaves_no_file_and_is_called_again(
    fake_compiler, tmp_path, failure, words
):
    fake_compiler(failure)
    with pytest.raises(NotCompiled, match=words):
        library(tmp_path / "cache", lambda: None)
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {"lock"}
    fake_compiler()
    assert library(tmp_path / "cache", lambda: None).exists()


def test_a_start_removes_the_directory_of_a_compilation_that_was_killed(fake_compiler, tmp_path):
    fake_compiler()
    cache = tmp_path / "cache"
    path = library(cache, lambda: None)
    path.unlink()
    (cache / f"{path.stem}abc").mkdir()
    (cache / f"{path.stem}abc" / "rows.o").touch()
    (cache / "other").mkdir()
    library(cache, lambda: None)
    assert {entry.name for entry in cache.iterdir()} == {path.name, "lock", "other"}


def test_a_compiler_that_hangs_is_ended(fake_compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "DEADLINE_S", 0.5)
    fake_compiler("exec sleep 60")
    with pytest.raises(NotCompiled, match="longer than"):
        library(tmp_path / "cache", lambda: None)


@pytest.fixture
def unchanged():
    """Restore the process's own choice after the test."""
    before, threads = device.compiled(torch.empty(0)), torch.get_num_threads()
    yield
    device.use_compiled(before)
    torch.set_num_threads(threads)


FLAGS = "flags : fpu {}\n"
V3 = "avx2 bmi1 bmi2 f16c fma movbe abm"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    "features, level",
    [
        (f"{V4} avx512_vnni avx512_bf16 amx_bf16 amx_int8 amx_tile", "amx"),
        (f"{V4} avx512_vnni avx512_bf16", "avx512-bf16"),
        (f"{V4} avx512_vnni", "avx512-vnni"),
        (V4, "avx512"),
        (f"{V3} avx512f", "avx2"),
        ("sse2", None),
    ],
)
def test_the_best_supported_library_of_an_image_is_used(
    fake_compiler, tmp_path, monkeypatch, features, level
):
    calls = fake_compiler()
    compiler.prebuild(tmp_path / "image")
    assert _links(calls) == len(compiler.LEVELS)
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(f"processor : 0\n{FLAGS.format(features)}\nprocessor : 1\n")
    monkeypatch.setattr(compiler, "_CPUINFO", cpus)
    found = compiler.prebuilt(tmp_path / "image")
    assert (found and found.name.rpartition("-")[0]) == level
    assert compiler.prebuilt(tmp_path) is None


def test_a_library_of_other_sources_is_not_loaded(fake_compiler, tmp_path, monkeypatch):
    fake_compiler()
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(FLAGS.format(V3))
    monkeypatch.setattr(compiler, "_CPUINFO", cpus)
    compiler.prebuild(tmp_path / "image")
    assert compiler.prebuilt(tmp_path / "image")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "other.cpp").write_text("int other;")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    assert compiler.prebuilt(tmp_path / "image") is None


def test_an_engine_loads_the_library_of_its_image_and_compiles_nothing(
    fake_compiler, tmp_path, monkeypatch, unchanged, operators
):
    built = library(compiler.cache_directory(), lambda: None)
    calls = fake_compiler("exit 1")
    monkeypatch.setattr(cpu, "prebuilt", lambda: built)
    use_cpu(1, "required")
    assert device.compiled(torch.empty(0)) is not None
    assert not calls.exists()


def test_an_engine_that_requires_compiled_operations_does_not_start_without(
    fake_compiler, tmp_path, monkeypatch, unchanged
):
    cache = tmp_path / "home"
    cache.write_text("a file, so nothing can be kept below it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    fake_compiler()
    with pytest.raises(ConfigError, match=r"cpu_kernels is required.*set XDG_CACHE_HOME or HOME"):
        use_cpu(1, "required")


@pytest.mark.parametrize("what", ["no compiler", "it fails", "no library", "no cache"])
def test_an_engine_without_compiled_operations_starts_and_logs_the_reason(
    fake_compiler, tmp_path, monkeypatch, caplog, unchanged, what
):
    cache = tmp_path / "home"
    monkeypatch.setattr(cpu, "prebuilt", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    fake_compiler("exit 1" if what == "it fails" else "")  # the compiler's output is no library
    if what == "no compiler":
        monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    if what == "no cache":
        cache.write_text("a file")
    with caplog.at_level(logging.WARNING):
        use_cpu(1, "auto")
    assert device.compiled(torch.empty(0)) is None
    assert [record.message for record in caplog.records if "compiled" in record.message]


def test_compiled_operations_can_be_disabled(monkeypatch, unchanged, operators):
    device.use_compiled(operators)
    assert device.compiled(torch.empty(0)) is operators
    use_cpu(1, "off")
    assert device.compiled(torch.empty(0)) is None


def test_the_cache_directory_can_be_set_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / "baton" / "kernels"
    assert os.path.isabs(compiler.cache_directory())
