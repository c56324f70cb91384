"""Operations of optional packages, in place of the kernels of this repository."""
