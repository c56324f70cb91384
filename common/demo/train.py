"""Trains the demo model from nothing, on tasks drawn as it goes, and measures it.

    python -m common.demo.train DIR [--threads 2]

Every step learns from three batches of conversations: facts to recall, lists to copy, sums and
lists to reverse. Two things make it quick. Copying lists of all lengths forms the heads that find
what was said before; recall alone stays at guessing for thousands of steps. And the conversations
of the first two batches double in length, up to LENGTHS[-1], whenever recall has been learned at
the length before; they start with known words only.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from common.demo import evaluate, tasks
from common.demo.rows import Encoder, loss_and_right
from common.demo.tokenizer import make_tokenizer

SEED = 7
STEPS = 3000
WARM_UP_STEPS = 100
LENGTHS = (32, 64, 128, 256, 512, 1024, 2304)
LONGEST_COPY = 512
SHORT_LENGTH = 32
BATCH_TOKENS = 1024
LEARNED = 0.9
WINDOW = 400  # answers over which that is counted
REPORT_STEPS = 50


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=800,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


class Curriculum:
    """How long the conversations are: as long as what has been learned allows."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._stage = 0
        self._recent: deque[bool] = deque(maxlen=WINDOW)

    @property
    def length(self) -> int:
        return LENGTHS[self._stage]

    @property
    def rate(self) -> float:
        """Answers right of the last ones at this length."""
        return sum(self._recent) / max(1, len(self._recent))

    @property
    def word(self) -> tasks.Draw:
        return tasks.any_word if self._stage else tasks.known_word

    def draw(self) -> int:
        """A length for the next step: the longest one, every other time a shorter one."""
        shorter = self._random.random() < 0.5 * (self._stage > 0)
        return self._random.choice(LENGTHS[: self._stage]) if shorter else self.length

    def note(self, length: int, right: list[bool]) -> None:
        if length != self.length:
            return
        self._recent.extend(right)
        learned = len(self._recent) == WINDOW and self.rate >= LEARNED
        if learned and self._stage + 1 < len(LENGTHS):
            self._stage += 1
            self._recent.clear()


class Optimizer:
    """Muon for the matrices between layers, AdamW for the rest, one schedule for both.

    Muon is what makes the search heads form within hundreds of steps instead of thousands.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self._parameters = [*matrices, *others]
        self._optimizers = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01),
        ]

        def share(step: int) -> float:
            return min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.0, 1.0 - step / steps)

        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in self._optimizers
        ]

    def step(self) -> None:
        """Applies the gradients and forgets them."""
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    report: Callable[[int, str], None],
) -> None:
    random = Random(SEED)
    encoder = Encoder(tokenizer)
    optimizer = Optimizer(model, steps)
    curriculum = Curriculum(random)
    model.train()
    losses: dict[str, float] = {}
    for step in range(steps):
        length = curriculum.draw()
        word = curriculum.word
        for name, row_length, conversation in (
            ("recall", length, partial(tasks.recalls, word=word)),
            ("copy", min(length, LONGEST_COPY), partial(tasks.copies, word=word)),
            ("short", SHORT_LENGTH, tasks.sums_and_lists),
        ):
            count = max(1, BATCH_TOKENS // row_length)
            rows = encoder.rows(
                [conversation(random, row_length) for _ in range(count)], row_length
            )
            loss, right = loss_and_right(model, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[name] = 0.95 * losses.get(name, loss.item()) + 0.05 * loss.item()
            if name == "recall":
                curriculum.note(length, right.tolist())
        optimizer.step()
        if (step + 1) % REPORT_STEPS == 0:
            said = " ".join(f"{name} {value:.3f}" for name, value in losses.items())
            report(
                step + 1, f"length {curriculum.length}, right {curriculum.rate:.3f}, loss {said}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m common.demo.train", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    tokenizer.save_pretrained(options.directory)
    started, cpu = time.monotonic(), time.process_time()

    def report(step: int, state: str) -> None:
        model.save_pretrained(options.directory)
        took = f"{time.monotonic() - started:.0f} s, CPU {time.process_time() - cpu:.0f} s"
        print(f"step {step} of {options.steps}, {took}: {state}", flush=True)

    train(model, tokenizer, options.steps, report)
    scores = evaluate.measure(options.directory)
    evaluate.show(scores)
    evaluate.write(scores, options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
