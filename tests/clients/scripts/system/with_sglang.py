"""`sglang.bench_serving --backend sglang`, which uses SGLang's /generate: every request gets a
response of the requested length."""

import json
import sys
import tempfile
from pathlib import Path

from served import ran, served

REQUESTS, LENGTH = 12, 8

at = served()
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "result.jsonl"
    ran(
        Path(sys.executable),
        str(Path(__file__).parent / "sglang_load.py"),
        *("--backend", "sglang", "--base-url", at.url),
        *("--model", at.directory, "--served-model-name", at.model, "--tokenizer", at.directory),
        *("--dataset-name", "random-ids", "--random-input-len", "64"),
        *("--random-output-len", str(LENGTH), "--random-range-ratio", "1"),
        *("--num-prompts", str(REQUESTS), "--output-file", str(file), "--flush-cache"),
        HF_HUB_OFFLINE="1",
    )
    said = json.loads(file.read_text())
assert said["completed"] == REQUESTS, said
assert said["total_output_tokens"] == REQUESTS * LENGTH, said
