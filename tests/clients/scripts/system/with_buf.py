"""`buf curl`, which finds the router's methods by reflection: a streamed response, and the
status and message of a rejection."""

import json
import subprocess
import sys
from pathlib import Path

from served import messages, served

BUF = Path(sys.prefix) / "node_modules/.bin/buf"
FLAGS = ("curl", "--protocol", "grpc", "--http2-prior-knowledge")

at = served()


def call(method: str, **fields: object) -> subprocess.CompletedProcess[str]:
    url = f"http://{at.grpc}/baton.v1.Router/{method}"
    command = [BUF, *FLAGS, "--data", json.dumps(fields), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


answered = call("Generate", text="add 27 15 =", sampling={"max_tokens": 16})
assert not answered.returncode, answered.stderr
said = messages(answered.stdout)
assert "".join(message.get("text", "") for message in said).strip() == "42", said
assert said[-1]["finishReason"] == "stop", said
refused = json.loads(call("Generate", text="x", sampling={"top_p": 7}).stderr)
assert refused["code"] == "invalid_argument" and "top_p" in refused["message"], refused
assert json.loads(call("Tokenize", text="add").stdout)["tokenIds"]
