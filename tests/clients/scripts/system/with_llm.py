"""The command `llm` with an extra-openai-models.yaml: streamed and not, a schema, a tool."""

import json
import tempfile
from pathlib import Path

from served import beside_python, ran, served

ENTRY = """
- model_id: ours
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
"""
ADD = '''
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b
'''

at = served()
with tempfile.TemporaryDirectory() as home:
    (Path(home) / "extra-openai-models.yaml").write_text(ENTRY.format(**at._asdict()))

    def llm(*arguments: str) -> str:
        asked = ("-m", "ours", "--key", "x", "-o", "temperature", "0", *arguments)
        return ran(beside_python("llm"), "prompt", *asked, LLM_USER_PATH=home).strip()

    assert llm("add 27 15 =") == llm("--no-stream", "add 27 15 =") == "42"
    assert isinstance(json.loads(llm("--schema", "answer int", "json add 27 15 ="))["answer"], int)
    assert "222" in llm("--functions", ADD, "add 123 99 =")
    assert json.loads(ran(beside_python("llm"), "logs", "--json", LLM_USER_PATH=home))
