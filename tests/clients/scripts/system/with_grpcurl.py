"""grpcurl, which finds the router's methods by reflection: health, a response, a rejection."""

import json
import subprocess

from served import beside_python, messages, served

at = served()


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [beside_python("grpcurl"), "-plaintext", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def call(method: str, **fields: object) -> subprocess.CompletedProcess[str]:
    return grpcurl("-d", json.dumps(fields), at.grpc, method)


assert "baton.v1.Router" in grpcurl(at.grpc, "list").stdout.split()
assert '"SERVING"' in call("grpc.health.v1.Health/Check").stdout
answered = call("baton.v1.Router/Generate", text="add 27 15 =", sampling={"max_tokens": 16})
assert not answered.returncode, answered.stderr
said = messages(answered.stdout)
assert "".join(message.get("text", "") for message in said).strip() == "42", said
assert said[-1]["finish_reason"] == "stop", said
refused = call("baton.v1.Router/Generate", text="x", sampling={"top_p": 7})
assert "InvalidArgument" in refused.stderr and "top_p" in refused.stderr, refused.stderr
