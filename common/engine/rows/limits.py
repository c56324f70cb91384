"""What this node can ever serve: checked once, before a request is queued anywhere."""

from dataclasses import dataclass

from common.engine.rows.request import Ints
from common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """context_length counts prompt and output; num_pages is the whole pool."""

    context_length: int
    vocabulary_size: int
    page_size: int
    num_pages: int

    def check(self, token_ids: Ints) -> None:
        """Raises InvalidRequest, with a sentence that names the field, where the tokens (prompt,
        then what was generated already) can never be served with at least one token more."""
        num_tokens = len(token_ids)
        if not num_tokens:
            raise InvalidRequest("token_ids: the prompt is empty")
        if num_tokens >= self.context_length:
            raise InvalidRequest(
                f"token_ids: {num_tokens} tokens leave no room in a context of "
                f"{self.context_length}"
            )
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.vocabulary_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"token_ids: {wrong} is outside the vocabulary of {self.vocabulary_size}"
            )
        needed = num_tokens // self.page_size + 1
        if needed > self.num_pages:
            raise InvalidRequest(
                f"token_ids: {num_tokens} tokens need {needed} KV pages, the pool has "
                f"{self.num_pages}"
            )
