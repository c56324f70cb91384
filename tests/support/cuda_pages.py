"""Pages in the memory of a GPU that tests read and write as arrays of host memory."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class CudaPages:
    """uint8 [num_pages, page_bytes]. What is indexed or compared is copied to the host first."""

    def __init__(self, num_pages: int, page_bytes: int, device: str) -> None:
        self._tensor = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)

    @property
    def address(self) -> int:
        return self._tensor.data_ptr()

    def copy(self) -> NDArray[np.uint8]:
        copied: NDArray[np.uint8] = self._tensor.cpu().numpy()
        return copied

    def __getitem__(self, key: Any) -> Any:
        return self.copy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        pages = self.copy()
        pages[key] = value
        self._tensor.copy_(torch.from_numpy(pages))
        torch.cuda.synchronize()

    def __eq__(self, other: object) -> Any:
        return self.copy() == other

    def __ne__(self, other: object) -> Any:
        return self.copy() != other

    __hash__ = None  # type: ignore[assignment]
