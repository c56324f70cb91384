"""Rerankers that are asked in words whether a document answers a query, and say yes or no."""

from dataclasses import dataclass

from api.requests.generate_params import Text
from api.text.tokenizer import RouterTokenizer
from common.errors import ConfigError

# As Qwen3-Reranker was trained.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class YesOrNo:
    """labels: token ids of "yes" and "no"."""

    labels: tuple[int, int]

    def prompt(self, query: str, document: str, task: str | None) -> Text:
        """
        Args:
            task: what a document is wanted for; None: as the model was trained.
        """
        asked = f"<Instruct>: {task or _TASK}\n<Query>: {query}\n<Document>: {document}"
        return Text(f"{_BEFORE}{asked}{_BEHIND}", add_special_tokens=False)


def qwen3(tokenizer: RouterTokenizer) -> YesOrNo:
    """Raises ConfigError where the model cannot say yes or no in one token."""
    yes, no = tokenizer.token_of("yes"), tokenizer.token_of("no")
    if yes is None or no is None:
        raise ConfigError("--reranker: qwen3 is for models with a token for yes and one for no")
    return YesOrNo((yes, no))
