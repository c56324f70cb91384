"""The last token sampled in every slot, on the device, which the CPU may not know yet."""

import torch
from torch import Tensor


class FutureMap:
    """The last tokens by slot. Written after sampling and read at the start of the next forward,
    both on the forward stream.

    A step's input refers to a token that the CPU does not know as -(slot + 1).

    Attributes:
        tokens: int32 [num_slots].
        rejected: int32 [num_slots], number of rejected drafts. Valid for slots whose row had drafts
            in the previous step.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]

    def store(self, slots: Tensor, tokens: Tensor, rejected: Tensor | None = None) -> None:
        """Store tokens[i] as the last one of slots[i] (int64, distinct).

        A row without a valid token (a negative one) still takes part in a step that is launched
        before the CPU knows. It gets token 0, and its result is discarded.
        """
        self.tokens.index_copy_(0, slots, tokens.clamp(min=0))
        if rejected is not None:
            self.rejected.index_copy_(0, slots, rejected)
