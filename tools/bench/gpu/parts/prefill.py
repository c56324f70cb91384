"""Part prefill: whole prompts through a model, against the rate of matrix products.

Only the necessary FLOPs count: every weight of the layers twice per token, two products with every
key that a token attends to, and the head for the last token. A prompt is launched kernel by kernel,
as in serving, so a short prompt on a small model waits for the host.
"""

from collections.abc import Iterator
from typing import Any

from engine.models.decoder import DecoderSpec
from tools.bench.gpu.model import proof
from tools.bench.gpu.model.engine import PAGE_SIZE, make_pool
from tools.bench.gpu.model.models import random_model, spec_of
from tools.bench.gpu.model.proof import PromptForwards
from tools.bench.gpu.process import Row, guarded
from tools.bench.gpu.setting import Floor, Setting

MODELS = ("Llama-3-8B", "Qwen3-8B", "Qwen3-0.6B")
CASES = ((8192, 8192), (1024, 1024), (32768, 32768), (8192, 2048))  # tokens, chunk
DRY_CASES = ((40, 40), (40, 16))


def measure(setting: Setting) -> Iterator[Row]:
    for name in setting.sized(MODELS, ("tiny",)):
        proved = proof.row(setting, name)
        yield proved
        if not proved["right"]:
            continue
        model, _ = random_model(name, setting.device, setting.dtype)
        cases = setting.sized(CASES, DRY_CASES)
        pool = make_pool(model, -(-max(tokens for tokens, _ in cases) // PAGE_SIZE))
        for tokens, chunk in cases:
            rows = _prompt(setting, name, PromptForwards(model, pool, [tokens]), tokens, chunk)
            yield from guarded(f"{name}, {tokens} tokens", rows)


def _prompt(
    setting: Setting, name: str, forwards: PromptForwards, tokens: int, chunk: int
) -> Iterator[Row]:
    starts = range(0, tokens, chunk)
    chunks = [forwards.batch([start], [min(start + chunk, tokens)]) for start in starts]

    def work() -> None:
        for batch in chunks:
            forwards.logits(batch)

    work()
    timing = setting.clock.time(work, cold=False)
    products, attention = _flops(spec_of(name), tokens)
    floor = Floor("matmul", products + attention)
    yield {
        "table": "prompts",
        "model": name,
        "tokens": tokens,
        "chunk": chunk,
        "ms": timing.p50 * 1e3,
        "tokens_per_s": tokens / timing.p50,
        **floor.rate(timing.p50),
        "share": setting.share(floor, timing.p50),
        "attention_part": attention / floor.amount,
    }


def _flops(spec: DecoderSpec, tokens: int) -> tuple[float, float]:
    """Return the FLOPs of products with weights, and of attention."""
    model = spec.model
    products = 2.0 * tokens * model.products_per_token
    products += 2.0 * model.hidden_size * model.vocabulary_size
    seen = tokens * (tokens + 1) / 2
    mixers: list[Any] = [layer.mixer for layer in spec.layers]
    widths = sum(mixer.heads * mixer.head_dim for mixer in mixers)
    return products, 4.0 * seen * widths
