"""Operations of optional packages, which can replace kernels of this repository."""
