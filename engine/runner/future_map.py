"""The last token sampled in every slot, on the device: what the CPU does not know yet."""

import torch
from torch import Tensor


class FutureMap:
    """Written after sampling and read at the next forward's start, both on the forward stream.

    A step's input names a token that is still on its way as -(slot + 1).

    Attributes:
        tokens: int32 [num_slots].
        rejected: int32 [num_slots], drafts that did not stand; of a slot whose row in the step
            before had some.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.rejected = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]

    def store(self, slots: Tensor, tokens: Tensor, rejected: Tensor | None = None) -> None:
        """Remembers tokens[i] as the last of slots[i] (int64, distinct).

        A row that gave no token (a negative one) still takes part in a step that is launched
        before the CPU knows; it gets token 0, and its result is discarded.
        """
        self.tokens.index_copy_(0, slots, tokens.clamp(min=0))
        if rejected is not None:
            self.rejected.index_copy_(0, slots, rejected)
