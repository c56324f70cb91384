"""aiperf with streamed completions and chats: every request gets a response of the requested
length."""

import json
import tempfile
from pathlib import Path

from served import beside_python, ran, served

REQUESTS, LENGTH = 12, 8

at = served()
for kind in ("completions", "chat"):
    with tempfile.TemporaryDirectory() as directory:
        ran(
            beside_python("aiperf"),
            *("profile", "--model", at.model, "--url", at.url),
            *("--endpoint-type", kind, "--streaming"),
            *("--tokenizer", at.directory, "--use-server-token-count"),
            *("--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "1"),
            *("--isl", "64", "--osl", str(LENGTH), "--extra-inputs", "ignore_eos:true"),
            *("--ui", "none", "--output-artifact-dir", directory),
            HF_HUB_OFFLINE="",  # otherwise it rejects a local tokenizer
        )
        (file,) = Path(directory).rglob("profile_export_aiperf.json")
        said = json.loads(file.read_text())
    assert said["request_count"]["avg"] == REQUESTS, said
    assert not said.get("error_request_count", {}).get("avg"), said
    assert said["output_sequence_length"]["avg"] == LENGTH, said
