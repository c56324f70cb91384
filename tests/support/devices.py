"""Devices that the same test runs on: the CPU here, and a GPU where there is one."""

import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ON_CUDA = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
CPU_AND_CUDA = (pytest.param(CPU, id="cpu"), ON_CUDA)
