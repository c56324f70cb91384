"""instructor: its default mode, which is a named tool, streamed and not, and JSON schemas."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from served import served

at = served()


class Sum(BaseModel):
    a: int = Field(ge=0, le=999_999)
    b: int = Field(ge=0, le=999_999)


client = instructor.from_openai(OpenAI(base_url=f"{at.url}/v1", api_key="x", max_retries=0))
asked = {
    "model": at.model,
    "messages": [{"role": "user", "content": "add 1234 98765"}],
    "response_model": Sum,
    "max_retries": 0,
    "temperature": 0,
}
answer = client.chat.completions.create(**asked)
assert (answer.a, answer.b) == (1234, 98765), answer
parts = list(client.chat.completions.create_partial(**asked))
assert parts[-1].model_dump() == answer.model_dump(), parts
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    other = instructor.from_openai(
        OpenAI(base_url=f"{at.url}/v1", api_key="x", max_retries=0), mode=mode
    )
    assert isinstance(other.chat.completions.create(**asked), Sum), mode
