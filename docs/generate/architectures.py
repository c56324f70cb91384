"""Check each causal language model class of transformers: is it served, token for token?

    python -m docs.generate.architectures             # those that architectures.jsonl lacks
    python -m docs.generate.architectures olmo2 phi3  # these, again
    python -m docs.generate.models                    # docs/models.md, from the results

Each class is checked in a process of its own. If its default configuration is not supported, the
reason is recorded. For the other classes, transformers saves a tiny random checkpoint, which is
loaded by the transformers backend. Prompts of several lengths then go through a prefill and a
decode node with chunks, hand-offs and both caches, once uncached and once cached. Both nodes are in
one process, and pages cross by loopback (`tests.pair.rig`). Each greedy token is compared
with the class's own full forward over all tokens before it, without any cache. Two ranks, as
threads, then compute the same prompts.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import ConfigError
from engine.models import open_checkpoint
from engine.models.families import FAMILIES
from engine.models.spec import LoadTarget
from engine.models.transformers_backend import TransformersCheckpoint
from engine.ranks import Share
from tests.pair.node import Loaded, Size
from tests.pair.rig import PairRig
from tests.support.engine.steps import Steps
from tests.support.engine.thread_ranks import run_ranks
from tests.support.models.tiny_models import VOCABULARY_SIZE, make_tiny

FILE = Path(__file__).with_suffix(".jsonl")
DEADLINE_S = 150.0
NUM_TOKENS = 8
CHUNK_TOKENS = 32
RANKS = 2
LENGTHS = (1, 16, 45, 90)
CPU = torch.device("cpu")
# The class is built with a size that its default configuration lacks. The tiny checkpoint sets it.
_UNSAID = ("cannot be built from its configuration", "of one token without weights failed")


@dataclass(frozen=True, slots=True)
class Found:
    """The result for one class.

    Attributes:
        reason: why the class is not served.
        same: number of tokens equal to the class's own, of `asked`.
        ranks: why RANKS ranks do not compute the same tokens, or "".
    """

    kind: str
    name: str
    native: bool
    reason: str = ""
    same: int = 0
    asked: int = 0
    keeps: str = ""
    ranks: str = ""
    transformers: str = transformers.__version__

    @property
    def served(self) -> bool:
        return self.asked > 0 and self.same == self.asked


def examined(kind: str) -> Found:
    """Examine one class."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    found = {"kind": kind, "name": name, "native": kind in FAMILIES}
    with tempfile.TemporaryDirectory() as where:
        reason = _refused(Path(where), kind)
        if reason and not any(unsaid in reason for unsaid in _UNSAID):
            return Found(**found, reason=reason)
    with tempfile.TemporaryDirectory() as where:
        try:
            directory = make_tiny(Path(where), kind)
        except (
            AttributeError,
            ImportError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            return Found(**found, reason=reason or f"no tiny one could be made: {_line(error)}")
        try:
            loadable = open_checkpoint(directory, "transformers")
        except ConfigError as error:
            return Found(**found, reason=_reason(error))
        context = min(512, loadable.spec.context_length)
        source = random.Random(0)
        lengths = sorted({min(length, context - NUM_TOKENS) for length in LENGTHS})
        prompts = [source.choices(range(2, VOCABULARY_SIZE - 64), k=length) for length in lengths]
        reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        expected = [_own(reference.eval(), prompt) for prompt in prompts]
        same = _through_a_pair(directory, context, prompts, expected)
        kept = {f"{kv.kv_heads} x {kv.head_dim}" for kv in loadable.spec.layers}
        return Found(
            **found,
            asked=2 * NUM_TOKENS * len(prompts),
            same=same,
            keeps=", ".join(sorted(kept)),
            ranks=_by_ranks(directory, context, prompts, expected),
        )


def _refused(directory: Path, kind: str) -> str:
    """Return why the class is not served with its default configuration, or "" if it is."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind]()
        if "is_decoder" in config.to_dict():
            config.is_decoder = True
        config.save_pretrained(directory)
    except Exception as error:  # noqa: BLE001 (a class's own check of its own defaults)
        return f"cannot be built from its configuration: {_line(error)}"
    try:
        TransformersCheckpoint(directory, "")
    except ConfigError as error:
        return _reason(error)
    return ""


def _through_a_pair(
    directory: Path, context: int, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> int:
    """Return how many of the generated tokens equal those of the class's own forward."""
    loadable = open_checkpoint(directory, "transformers")
    loaded = Loaded(directory, loadable.load(LoadTarget(CPU, torch.float32)))
    same = 0
    with PairRig(
        loaded,
        prefill=[Size()],
        decode=[Size()],
        chunked_prefill_tokens=CHUNK_TOKENS,
        context_length=context,
    ) as rig:
        for _ in range(2):
            asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
            rig.run()
            pairs = zip(asked, expected, strict=True)
            same += sum(a == b for one, own in pairs for a, b in zip(one.tokens, own, strict=True))
    return same


def _by_ranks(
    directory: Path, context: int, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> str:
    """Return why ranks do not compute the expected tokens, or ""."""
    loadable, loading = open_checkpoint(directory, "transformers"), threading.Lock()
    try:
        loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=Share(0, RANKS)))
    except ConfigError as error:
        return str(error).partition(f"{RANKS} ranks: ")[2] or str(error)

    def tokens(share: Share) -> list[list[int]]:
        with loading:  # transformers sets globals meanwhile
            model = loadable.load(LoadTarget(CPU, torch.float32, share=share))
        steps = Steps(model, num_slots=len(prompts), context_length=context, share=share)
        generated = steps.generate(prompts, NUM_TOKENS, chunk=CHUNK_TOKENS)
        steps.close()
        return generated

    return "" if run_ranks(RANKS, tokens) == [expected] * RANKS else "tokens differ"


def _own(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _reason(error: ConfigError) -> str:
    return str(error).partition(" is not supported: ")[2] or str(error).partition(": ")[2]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _child(kind: str, end: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        end.send(examined(kind))
    except Exception as error:  # noqa: BLE001 (whatever a class does is its finding)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        end.send(Found(kind, name, kind in FAMILIES, f"failed: {_line(error)}"))


def examine(kind: str) -> Found:
    """Examine a class in a process of its own, within DEADLINE_S."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(kind, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        if ours.poll(DEADLINE_S):
            found: Found = ours.recv()
            return found
        reason = f"took longer than {DEADLINE_S:.0f} s"
    except EOFError:
        reason = "its process ended"
    finally:
        child.kill()
        child.join()
    return Found(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], kind in FAMILIES, reason)


def read() -> dict[str, Found]:
    """Return the results so far, by model_type."""
    if not FILE.exists():
        return {}
    lines = map(json.loads, FILE.read_text().splitlines())
    return {line["kind"]: Found(**line) for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="model types; default: all that are not known yet")
    asked = parser.parse_args().kinds
    known = read()
    for kind in asked or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in known]:
        started = time.monotonic()
        found = known[kind] = examine(kind)
        result = f"{found.same} of {found.asked} tokens" if found.asked else found.reason
        print(f"{kind:24} {time.monotonic() - started:5.1f} s  {result}", flush=True)
        lines = (json.dumps(asdict(known[kind])) + "\n" for kind in sorted(known))
        FILE.write_text("".join(lines))
    served = sum(found.served for found in known.values())
    print(f"{served} of {len(known)} are served token for token", file=sys.stderr)


if __name__ == "__main__":
    main()
