"""Images through real processes, with OpenAI's own client. Responses are those of transformers
to the prompt that its own processor makes of image and text."""

from pathlib import Path

import openai
import pytest

pytest.importorskip("PIL")

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import Tokenizer

from tests.support.models.vision import (
    BEGIN,
    END,
    PAD,
    PAD_ID,
    data_url,
    image_processor,
    make_vision_checkpoint,
    reference_vision_model,
)
from tests.support.processes.cluster import CPU, Cluster

pytestmark = pytest.mark.long

NUM_TOKENS = 12


def expected(directory: Path, image: Pillow.Image, question: str) -> str:
    inputs = dict(image_processor()([image], return_tensors="pt"))
    _, height, width = inputs["image_grid_thw"][0].tolist()
    pads = PAD * (height * width // 4)
    text = f"<|start|>user\n{question}{BEGIN}{pads}{END}<|end|>\n<|start|>assistant\n"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    model = reference_vision_model(directory)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == PAD_ID).int(),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **inputs,
        )
    answered: str = tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return answered


# Other models and videos: tests/pair/images/test_image_models.py, tests/pair/images/test_videos.py,
# tests/api/images.
async def test_the_response_to_an_image_is_that_of_transformers(tmp_path: Path) -> None:
    directory = make_vision_checkpoint(tmp_path / "model", model_type="qwen3_vl")
    noise = np.random.default_rng(3).integers(0, 256, (45, 70, 3), np.uint8)
    image = Pillow.fromarray(noise)
    content = [
        {"type": "text", "text": "What is it? "},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]
    async with Cluster(directory, tmp_path, rig=CPU, path="tcp") as cluster:
        base = f"http://127.0.0.1:{cluster.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
            answers = [
                await client.chat.completions.create(
                    model=str(directory),
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
                    temperature=0,
                    max_tokens=NUM_TOKENS,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(2)
            ]
    wanted = expected(directory, image, "What is it? ")
    assert [answer.choices[0].message.content for answer in answers] == [wanted] * 2
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0
