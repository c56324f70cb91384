"""Soft cap of logits: a limit by a hyperbolic tangent."""

from torch import Tensor

from kernels import device


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) of [n, vocabulary] in float32.

    Args:
        cap: above 0.
    """
    compiled = None if device.uses_triton(logits) else device.compiled(logits)
    if compiled is not None:
        return compiled.soft_cap(logits, cap)
    return soft_cap_reference(logits, cap)


def soft_cap_reference(logits: Tensor, cap: float) -> Tensor:
    return (logits.float() / cap).tanh_().mul_(cap)
