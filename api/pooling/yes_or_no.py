"""Generative rerankers, which answer in yes or no whether a document matches a query."""

from dataclasses import dataclass

from api.requests.generate_params import TextPrompt
from api.text.tokenizer import RouterTokenizer
from common.errors import ConfigError

# The training format of Qwen3-Reranker.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class YesNoReranker:
    """Prompt format of a reranker. `labels`: token ids of "yes" and "no"."""

    labels: tuple[int, int]

    def prompt(self, query: str, document: str, task: str | None) -> TextPrompt:
        """Return the prompt for one document.

        Args:
            task: the purpose of documents. None: the model's default.
        """
        asked = f"<Instruct>: {task or _TASK}\n<Query>: {query}\n<Document>: {document}"
        return TextPrompt(f"{_BEFORE}{asked}{_BEHIND}", add_special_tokens=False)


def qwen3(tokenizer: RouterTokenizer) -> YesNoReranker:
    """Return Qwen3's format. Raise ConfigError if yes or no is not a single token."""
    yes, no = tokenizer.token_of("yes"), tokenizer.token_of("no")
    if yes is None or no is None:
        raise ConfigError("--reranker: qwen3 is for models with a token for yes and one for no")
    return YesNoReranker((yes, no))
