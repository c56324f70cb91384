"""Operations of optional packages (FlashInfer, flash-linear-attention), which can replace Baton's
kernels.
"""
