"""guidellm with short streams: every request gets a complete response."""

import json
import tempfile
from pathlib import Path

from served import beside_python, ran, served

REQUESTS = 12

at = served()
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "guidellm.json"
    ran(
        beside_python("guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={at.url},model={at.model}"),
        *("--tokenizer", f"kind=hf_auto,model={at.directory}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={file}", "--disable-console-interactive"),
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
