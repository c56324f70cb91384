"""The meaning of `engine.dtype`: by device, processor and stored dtype."""

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


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "name, device, dtypes, features, chosen, because",
    [
        ("auto", CPU, (BF16, F32), ["avx512_bf16"], BF16, "the processor has avx512_bf16"),
        ("auto", CPU, (F16, F32), ["avx512_bf16"], BF16, "the processor has avx512_bf16"),
        ("auto", CPU, (BF16,), ["avx512_vnni"], F32, "the processor has no native bfloat16"),
        ("auto", CPU, (F32, F32), ["amx_bf16"], F32, "the checkpoint is float32 and below 256 MiB"),
        ("auto", CUDA, (F32,), [], BF16, "the device is a GPU"),
        *((str(dtype)[6:], CPU, (F32,), [], dtype, "as configured") for dtype in (F32, BF16, F16)),
    ],
)
def test_a_dtype_is_chosen_by_device_processor_and_checkpoint(
    stored, name, device, dtypes, features, chosen, because
):
    precision = choose_precision(name, device, stored(*dtypes), features)
    assert (precision.dtype, precision.because) == (chosen, because)
    assert str(precision) == str(chosen).removeprefix("torch.")


def test_a_large_float32_checkpoint_is_rounded(stored, monkeypatch):
    monkeypatch.setattr(precision, "SMALL_BYTES", 64)
    assert choose_precision("auto", CPU, stored(F32, F32), ["amx_bf16"]).dtype == BF16


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
def test_processor_features_are_read_as_the_linux_kernel_reports_them(tmp_path, cpuinfo, features):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert " ".join(matrix_features(tmp_path / "cpuinfo")) == features
