"""The training recipe runs, and its parts have the properties that the training relies on."""

from dataclasses import replace
from random import Random

import torch

from tools.demo import train
from tools.demo.rows import RowEncoder, loss_and_right
from tools.demo.tasks import Exchange
from tools.demo.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()


def _trained(steps: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    said = []
    torch.manual_seed(train.SEED)
    model = train.make_model(TOKENIZER)
    train.train(model, TOKENIZER, train.COURSES[0]._replace(steps=steps), said.append)
    return model.state_dict(), said


def test_the_model_is_small():
    parameters = train.make_model(TOKENIZER).parameters()
    assert sum(parameter.numel() for parameter in parameters) <= 2_000_000


def test_the_same_seed_gives_the_same_weights():
    first, _ = _trained(2)
    second, _ = _trained(2)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value)


def test_only_answers_and_their_ends_are_trained():
    rows = RowEncoder(TOKENIZER).rows(
        [[Exchange("add 27 15 =", "42"), Exchange("fox =", "tea")]], 16
    )
    asked = rows.following[rows.answers >= 0]
    assert TOKENIZER.decode(asked) == " 42<|end|> tea<|end|>"
    assert rows.answers[rows.answers >= 0].tolist() == [0, 0, 0, 0, 1, 1]


def test_an_answer_is_right_only_as_a_whole():
    torch.manual_seed(0)
    model = train.make_model(TOKENIZER)
    rows = RowEncoder(TOKENIZER).rows([[Exchange("copy a b =", "a b")]], 8)
    asked = rows.answers >= 0
    # The output of a random model is declared right, then all of it except one token.
    said = model(rows.tokens).logits.argmax(-1)
    assert loss_and_right(model, replace(rows, following=said))[1].tolist() == [True]
    said[asked] += torch.tensor([0, 1, 0])
    assert loss_and_right(model, replace(rows, following=said))[1].tolist() == [False]


def test_lengths_double_when_they_have_been_learned():
    curriculum = train.Curriculum(Random(0))
    curriculum.note(32, [True, False] * train.WINDOW)
    assert curriculum.length == 32
    curriculum.note(64, [True] * train.WINDOW)  # of another length: not counted
    assert curriculum.length == 32
    curriculum.note(32, [True] * train.WINDOW)
    assert curriculum.length == 64
    drawn = {curriculum.draw_length() for _ in range(50)}
    assert drawn == {32, 64}
    for length in train.LENGTHS[1:] * 2:
        curriculum.note(length, [True] * train.WINDOW)
    assert curriculum.length == train.LENGTHS[-1]
