"""Part prefill: whole prompts through a model, against the rate of matrix products.

Only the necessary FLOPs count: every weight of the layers twice per token, two products with every
key that a token attends to, and the head for the last token. A prompt is launched kernel by kernel,
as in serving, so a short prompt on a small model waits for the host.
"""

from collections.abc import Iterator
from typing import Any

from engine.models.decoder import DecoderSpec
from tools.bench.gpu.frame import Row, Tables, guarded
from tools.bench.gpu.model import proof
from tools.bench.gpu.model.engine import PAGE_SIZE, make_pool
from tools.bench.gpu.model.forwards import Forwards
from tools.bench.gpu.model.models import random_model, spec_of
from tools.bench.gpu.setting import Setting, rate

TABLES: Tables = {
    "prompts": {
        "model": "{model}",
        "tokens": "{tokens}",
        "in chunks of": "{chunk}",
        "ms": "{ms:.1f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "": "{rate:.0f}",
        "unit": "{unit}",
        "share of the matmul ceiling": "{share:.1%}",
        "of it attention's FLOPs": "{attention_part:.0%}",
    },
    **proof.TABLES,
}

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
            rows = _prompt(setting, name, Forwards(model, pool, [tokens]), tokens, chunk)
            yield from guarded(f"{name}, {tokens} tokens", rows)


def _prompt(
    setting: Setting, name: str, forwards: Forwards, tokens: int, chunk: int
) -> Iterator[Row]:
    chunks = [
        forwards.batch([start], [min(start + chunk, tokens)]) for start in range(0, tokens, chunk)
    ]

    def work() -> None:
        for batch in chunks:
            forwards.logits(batch)

    work()
    timing = setting.clock.time(work, cold=False)
    spec = spec_of(name)
    products, attention = _flops(spec, tokens)
    flops = products + attention
    yield {
        "table": "prompts",
        "model": name,
        "tokens": tokens,
        "chunk": chunk,
        "ms": timing.p50 * 1e3,
        "tokens_per_s": tokens / timing.p50,
        **rate("matmul", flops, timing.p50),
        "share": setting.share("matmul", flops, timing.p50),
        "attention_part": attention / flops,
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
