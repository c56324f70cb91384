"""`vllm bench serve --logprobs` with completions and chats: every request gets a response of the
requested length."""

import json
import tempfile
from pathlib import Path

from served import beside_python, ran, served

REQUESTS, LENGTH = 12, 8
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}

at = served()
for backend, endpoint in ENDPOINTS.items():
    with tempfile.TemporaryDirectory() as directory:
        ran(
            beside_python("vllm"),
            *("bench", "serve", "--backend", backend),
            *("--base-url", at.url, "--endpoint", endpoint),
            *("--model", at.model, "--tokenizer", at.directory, "--dataset-name", "random"),
            *("--random-input-len", "64", "--random-output-len", str(LENGTH), "--ignore-eos"),
            *("--num-prompts", str(REQUESTS), "--logprobs", "3"),
            *("--save-result", "--result-dir", directory),
            HF_HUB_OFFLINE="1",
        )
        (file,) = Path(directory).glob("*.json")
        said = json.loads(file.read_text())
    assert (said["completed"], said.get("failed", 0)) == (REQUESTS, 0), said
    assert said["total_output_tokens"] == REQUESTS * LENGTH, said
