"""Converts conversations to tensors, for training and evaluation."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo.tasks import Exchange

_NOT_ASKED = -1


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Conversations, one per row, cut or padded to one length.

    All int64 [rows, length]. The last response may be cut off.
    """

    tokens: Tensor
    following: Tensor  # the token after each token
    answers: Tensor  # number of the response that contains the following token, or _NOT_ASKED


class RowEncoder:
    """Encodes conversations as rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._exact = Tokenizer.from_str(self._tokenizer.to_str())
        self._exact.normalizer = normalizers.Sequence([])
        self._exact.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._end: int = tokenizer.eos_token_id
        self._padding: int = tokenizer.pad_token_id

    def rows(self, conversations: Sequence[Sequence[Exchange]], length: int) -> TrainingRows:
        """Encode conversations. Responses are numbered consecutively over all rows."""
        exchanges = [exchange for conversation in conversations for exchange in conversation]
        encoded = zip(self.prompts(exchanges), self.answers(exchanges), strict=True)
        tokens = torch.full((len(conversations), length + 1), self._padding)
        answers = torch.full_like(tokens, _NOT_ASKED)
        number = 0
        for row, conversation in enumerate(conversations):
            ids: list[int] = []
            numbers: list[int] = []  # number of the response that contains the token
            for prompt, answer in itertools.islice(encoded, len(conversation)):
                ids += (*prompt, *answer)
                numbers += [_NOT_ASKED] * len(prompt)
                numbers += [number] * len(answer)
                number += 1
            kept = slice(min(len(ids), length + 1))
            tokens[row, kept] = torch.tensor(ids[kept])
            answers[row, kept] = torch.tensor(numbers[kept])
        return TrainingRows(tokens[:, :-1], tokens[:, 1:], answers[:, 1:])

    def prompts(self, exchanges: Sequence[Exchange]) -> list[list[int]]:
        return _ids(self._tokenizer, [exchange.prompt for exchange in exchanges])

    def answers(self, exchanges: Sequence[Exchange]) -> list[list[int]]:
        """Return the token ids of the responses, with their end tokens."""
        texts = [exchange.answer for exchange in exchanges]
        ways = zip(exchanges, _ids(self._tokenizer, texts), _ids(self._exact, texts), strict=True)
        return [[*(exact if one.exact else usual), self._end] for one, usual, exact in ways]


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def loss_and_right(model: Qwen3ForCausalLM, rows: TrainingRows) -> tuple[Tensor, Tensor]:
    """Run one forward pass.

    Returns:
        The mean cross-entropy over all tokens of responses. For every response, whether all its
        tokens including its end are the most likely ones: as there is only one correct response,
        greedy generation would then give exactly this response.
    """
    hidden = model.model(input_ids=rows.tokens, use_cache=False).last_hidden_state
    asked = rows.answers != _NOT_ASKED
    logits = model.lm_head(hidden[asked])
    expected = rows.following[asked]
    right = logits.argmax(-1) == expected
    numbers = rows.answers[asked]
    num_wrong = torch.zeros(int(numbers.max()) + 1).index_add_(0, numbers, (~right).float())
    there = numbers.bincount() > 0  # without responses that are cut off completely
    return functional.cross_entropy(logits, expected), num_wrong[there] == 0
