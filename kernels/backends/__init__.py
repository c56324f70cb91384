"""Operations of optional packages (FlashInfer, fla), which can replace Baton's kernels."""
