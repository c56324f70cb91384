"""The dimensions of models: a table by name, and checkpoint directories."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True):
    """The dimensions of a decoder with grouped-query attention in every layer, in bfloat16.

    Attributes:
        intermediate: hidden size of the MLP, or of each expert.
        experts: 0 in a dense model.
        experts_per_token: 0 in a dense model.
        tied: whether the head and the embeddings share their weights.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context_length: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Return the parameters of one MLP or expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        experts = max(1, self.experts) * self.mlp_parameters + self.hidden * self.experts
        layer = self.attention_parameters + experts + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden


MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "qwen3-32b": ModelShape(64, 5120, 64, 8, 128, 25600, 151936, 40960),
    "qwen3-30b-a3b": ModelShape(48, 2048, 32, 4, 128, 768, 151936, 40960, 128, 8),
    "mixtral-8x7b": ModelShape(32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2),
}
