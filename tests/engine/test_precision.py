"""The meaning of `engine.dtype`: by the device, the processor, and the stored dtype."""

import pytest
import torch
from safetensors.torch import save_file

from engine.models import precision
from engine.models.checkpoint import Checkpoint
from engine.models.precision import choose_precision
from engine.processor import matrix_features

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def stored(tmp_path):
    def of(*dtypes):
        tensors = {f"t{i}": torch.zeros(8, dtype=dtype) for i, dtype in enumerate(dtypes)}
        save_file(tensors, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path)

    return of


def test_auto_on_a_cpu_is_bfloat16_where_the_processor_has_it(stored):
    # Seen failing with float32 for every CPU.
    for half in (torch.bfloat16, torch.float16):
        chosen = choose_precision("auto", CPU, stored(half, torch.float32), ["avx512_bf16"])
        assert (chosen.dtype, chosen.because) == (torch.bfloat16, "the processor has avx512_bf16")


def test_auto_on_a_cpu_without_bfloat16_is_float32(stored):
    # Seen failing with the checkpoint's dtype alone.
    chosen = choose_precision("auto", CPU, stored(torch.bfloat16), ["avx512_vnni"])
    assert chosen.dtype == torch.float32
    assert "no native bfloat16" in chosen.because


def test_a_small_float32_checkpoint_stays_exact_and_a_large_one_does_not(stored, monkeypatch):
    # Seen failing without the look at the checkpoint.
    checkpoint = stored(torch.float32, torch.float32)
    chosen = choose_precision("auto", CPU, checkpoint, ["amx_bf16"])
    assert (str(chosen), "below 256 MiB" in chosen.because) == ("float32", True)
    monkeypatch.setattr(precision, "SMALL_BYTES", 64)
    assert choose_precision("auto", CPU, checkpoint, ["amx_bf16"]).dtype == torch.bfloat16


def test_auto_on_cuda_is_bfloat16_whatever_the_processor_has(stored):
    assert choose_precision("auto", CUDA, stored(torch.float32), []).dtype == torch.bfloat16


def test_what_is_asked_for_is_taken(stored):
    for name in ("float32", "bfloat16", "float16"):
        assert str(choose_precision(name, CPU, stored(torch.float32), [])) == name


@pytest.mark.parametrize(
    "cpuinfo, features",
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse avx512_vnni\n", "avx512_bf16 avx512_vnni"),
        ("processor\t: 0\nflags\t\t: fpu amx_bf16 amx_int8 amx_tile\n", "amx_bf16 amx_int8"),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm svebf16 bf16\n", "bf16 i8mm"),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", ""),
        ("", ""),
    ],
)
def test_features_are_read_as_the_kernel_tells_them(tmp_path, cpuinfo, features):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert " ".join(matrix_features(tmp_path / "cpuinfo")) == features
