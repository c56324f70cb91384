"""lm_eval's own harness with local-completions (echo and logprobs) on a task of local data:
log-likelihoods equal those of its `hf` model, which is transformers, for the same files."""

import json
import random
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from served import served

TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "target_delimiter": " ",
    "metric_list": [{"metric": "acc"}],
}
TOLERANCE = 1e-3  # of a sum over a choice's tokens

at = served()


def found(model: str, arguments: dict[str, object], task: dict[str, object]) -> tuple[list, float]:
    """Return the log-likelihood and greediness of every choice, and the accuracy."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        batch_size=1,
        device="cpu",
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["sums"], key=lambda sample: sample["doc_id"])
    figures = [choice for sample in samples for choice in sample["filtered_resps"]]
    return figures, results["results"]["sums"]["acc,none"]


def question(draw: random.Random) -> dict[str, object]:
    a, b = draw.randrange(100), draw.randrange(100)
    choices = [str(a + b), str(a + b + 1), str(draw.randrange(200))]
    return {"question": f"add {a} {b} =", "choices": choices, "answer": 0}


draw = random.Random(1)
with tempfile.TemporaryDirectory() as directory:
    data = Path(directory) / "sums.jsonl"
    data.write_text("\n".join(json.dumps(question(draw)) for _ in range(12)))
    task = {**TASK, "dataset_kwargs": {"data_files": str(data)}}
    ours, accuracy = found(
        "local-completions",
        {
            "model": at.model,
            "base_url": f"{at.url}/v1/completions",
            "tokenizer": at.directory,
            "num_concurrent": 4,
            "max_retries": 1,
        },
        task,
    )
    theirs, true = found("hf", {"pretrained": at.directory, "dtype": "float32"}, task)
for (ours_is, ours_greedy), (theirs_is, theirs_greedy) in zip(ours, theirs, strict=True):
    assert abs(ours_is - theirs_is) < TOLERANCE, (ours_is, theirs_is)
    assert ours_greedy == theirs_greedy
assert accuracy == true, (accuracy, true)
