"""SGLang's load generator, unmodified, without the parts that need a GPU. It imports two names
and the tokenizer loader of the rest of SGLang, which are replaced here."""

import sys
from importlib.util import find_spec
from types import ModuleType

from transformers import AutoTokenizer


def package(name: str) -> None:
    """Make its modules importable without running the package."""
    made = ModuleType(name)
    made.__path__ = list(find_spec(name).submodule_search_locations)
    sys.modules[name] = made


def stand_in(name: str, **names: object) -> None:
    made = ModuleType(name)
    vars(made).update(names)
    sys.modules[name] = made


for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
    package(name)
stand_in("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
stand_in("sglang.srt.utils.hf_transformers_utils", get_tokenizer=AutoTokenizer.from_pretrained)

from sglang.benchmark.serving import cli_main  # noqa: E402

cli_main()
