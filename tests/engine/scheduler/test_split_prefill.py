"""Split prefill: layers of a prompt in groups between decode steps, through loop and fake runner.

The rig has 8 layers, and a prompt's token takes 1 ms through all of them.
"""

import pytest

from common.config import EngineConfig, SchedulerConfig
from common.errors import ConfigError
from engine.batch.batch import ForwardMode
from engine.batch.request import FinishReason
from engine.load import check_features, load
from tests.support.engine.engine_rig import BOTH, NUM_LAYERS, Rig
from tests.support.engine.fake_backend import VOCABULARY
from tests.support.models.checkpoints import make_checkpoint

PROMPT = [i % VOCABULARY for i in range(64)]
LIMIT_MS = 16.0  # two layers of PROMPT


def _rig(**options) -> Rig:
    return Rig(**{"split_prefill_ms": LIMIT_MS, "chunked_prefill_tokens": 64, **options})


def _running(**options) -> Rig:
    """Return a rig with a running request."""
    rig = _rig(**options)
    rig.add([1, 2, 3], max_tokens=100)
    rig.step(3)
    return rig


def _groups(rig: Rig) -> list[tuple[int, int]]:
    return [batch.layers[:2] for batch in rig.runner.batches if batch.layers is not None]


def _modes(rig: Rig) -> list[ForwardMode]:
    return [batch.mode for batch in rig.runner.batches]


def _between_groups(rig: Rig) -> bool:
    layers = rig.runner.batches[-1].layers
    return layers is not None and not layers.is_last


@BOTH
def test_a_decode_step_runs_between_two_groups_of_layers(overlap):
    rig = _running(overlap_schedule=overlap)
    before = len(rig.runner.batches)
    rig.add(PROMPT, max_tokens=4)
    rig.complete()
    assert _groups(rig) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert _modes(rig)[before : before + 8] == [ForwardMode.SPLIT, ForwardMode.DECODE] * 4


def test_decode_rows_get_a_token_after_each_group():
    rig = _running(overlap_schedule=False)
    first = rig.requests[1]
    rig.add(PROMPT, max_tokens=4)
    for _ in range(4):
        known = len(rig.tokens[first.key])
        rig.step()
        assert rig.runner.batches[-1].mode is ForwardMode.SPLIT
        rig.step()
        assert len(rig.tokens[first.key]) == known + 1
    rig.complete()


def test_a_prompt_is_computed_at_once_while_no_request_runs():
    rig = _rig()
    rig.add(PROMPT, max_tokens=4)
    rig.complete()
    assert _modes(rig) == [ForwardMode.EXTEND] + [ForwardMode.DECODE] * 3


def test_a_prompt_is_split_beside_a_request_that_is_about_to_join():
    rig = _rig()
    first = rig.expected(rig.request([1, 2, 3]))[0][0]
    assert rig.land(rig.request([1, 2, 3], max_tokens=9, generated=[first]))
    prompt = rig.add(PROMPT, max_tokens=2)
    rig.step(2)
    rig.join_landed()
    rig.complete(prompt)
    assert _groups(rig)[0] == (0, 2)


def test_the_rest_of_a_prompt_is_computed_at_once_when_the_last_response_ends():
    rig = _running()
    rig.add(PROMPT, max_tokens=4)
    rig.run_until(lambda: _between_groups(rig))
    rig.abort(rig.requests[1])
    rig.complete()
    assert _groups(rig)[0] == (0, 2)
    assert _groups(rig)[-1][0] <= 4
    assert _groups(rig)[-1][1] == NUM_LAYERS


@pytest.mark.parametrize(
    "token_s, groups",
    [(0.0005, [(0, 4), (4, 8)]), (0.002, [(n, n + 1) for n in range(8)]), (0.0001, [])],
    ids=["faster", "slower", "within the limit"],
)
def test_the_size_of_a_group_follows_from_the_measured_time(token_s, groups):
    rig = _running()
    rig.token_s = token_s
    rig.add(PROMPT, max_tokens=2)
    rig.complete()
    assert _groups(rig) == groups


def test_a_single_layer_is_measured_first():
    rig = _running(token_s=None)
    rig.add(PROMPT, max_tokens=2)
    rig.run_until(lambda: _between_groups(rig))
    rig.token_s = 0.001
    rig.complete()
    assert _groups(rig) == [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]


def test_a_chunk_has_fewer_tokens_if_one_of_its_layers_would_take_too_long():
    rig = _running()
    rig.token_s = 0.004  # 32 tokens in 16 ms
    request = rig.add(PROMPT, max_tokens=2)
    rig.complete()
    assert [(chunk.start, chunk.end) for chunk in rig.chunks if chunk.request is request] == [
        (0, 32),
        (32, 64),
    ]
    assert _groups(rig) == [(n, n + 1) for n in range(8)] * 2


@BOTH
def test_all_prompts_of_a_forward_share_its_groups(overlap):
    rig = _running(overlap_schedule=overlap)
    rig.add([5] * 20, max_tokens=9)
    rig.add([6] * 30, max_tokens=9)
    rig.complete()
    assert _groups(rig) == [(0, 2), (2, 4), (4, 6), (6, 8)]


@BOTH
@pytest.mark.parametrize("steps", range(1, 10))
def test_an_aborted_prompt_ends_after_the_group_in_flight_and_releases_its_pages(overlap, steps):
    rig = _running(overlap_schedule=overlap)
    request = rig.add([5] * 60, max_tokens=20)
    rig.step(steps)
    rig.abort(request)
    groups = len(_groups(rig))
    rig.run_until(lambda: request.key in rig.finished)
    assert rig.finished[request.key].reason is FinishReason.ABORT
    if _groups(rig)[-1][1] != NUM_LAYERS:
        assert len(_groups(rig)) == groups + 1  # which has no layers
        assert _groups(rig)[-1][0] == _groups(rig)[-1][1]
        assert rig.cache.match(rig.came_with[request.key]).num_tokens == 0
    rig.complete()


def test_a_retracted_response_returns_with_a_group_of_layers():
    rig = _running(retract_every=2)
    rig.add([4, 5, 6], max_tokens=100)
    rig.step(3)
    rig.add(PROMPT, max_tokens=20)
    rig.complete()
    groups = [batch for batch in rig.runner.batches if batch.layers is not None]
    assert any(batch.swap_in is not None for batch in groups)


def test_states_to_be_cached_are_released_with_a_dropped_forward():
    rig = _running(state_pages=2)
    request = rig.add([5] * 60, max_tokens=20)
    rig.run_until(lambda: _between_groups(rig))
    assert rig.runner.batches[-1].kept
    rig.abort(request)
    rig.complete()
    assert _groups(rig)[-1] == (2, 2)


def test_a_prompt_continues_if_another_one_of_its_forward_is_aborted():
    rig = _running()
    first, second = rig.add([5] * 20, max_tokens=9), rig.add([6] * 30, max_tokens=9)
    rig.run_until(lambda: _between_groups(rig))
    rig.abort(first)
    rig.complete(second)
    assert _groups(rig)[-1] == (6, 8)


def test_a_prompt_past_its_deadline_ends_between_groups():
    rig = _running()
    request = rig.add([5] * 60, max_tokens=20, deadline=2000.0)
    rig.run_until(lambda: _between_groups(rig))
    rig.clock.now = 2001.0
    rig.run_until(lambda: request.key in rig.finished)
    assert len(_groups(rig)) < 4
    assert rig.tokens[request.key] == []
    rig.complete(rig.requests[1])


@BOTH
def test_a_pause_computes_the_rest_of_the_forward_and_nothing_else(overlap):
    rig = _running(overlap_schedule=overlap)
    request = rig.add(PROMPT, max_tokens=4)
    rig.run_until(lambda: _between_groups(rig))
    rig.scheduler.paused = True
    assert not rig.scheduler.at_rest
    before = len(rig.runner.batches)
    rig.run_until(lambda: rig.scheduler.at_rest)
    assert [batch.layers[1] for batch in rig.runner.batches[before:]] == [NUM_LAYERS]
    rig.scheduler.requeue_all()
    rig.scheduler.clear_cache()
    rig.check()
    assert len(rig.tokens[request.key]) == 1
    rig.scheduler.paused = False
    rig.complete()


def test_a_pause_drops_a_forward_whose_requests_end():
    rig = _running(overlap_schedule=False)
    request = rig.add(PROMPT, max_tokens=4)
    rig.run_until(lambda: _between_groups(rig))
    rig.scheduler.paused = True
    rig.abort(request)
    rig.run_until(lambda: rig.scheduler.at_rest)
    assert request.key in rig.finished
    assert _groups(rig)[-1] == (2, 2)
    rig.scheduler.paused = False
    rig.complete()


def test_logits_that_are_not_finite_end_a_split_prompt():
    rig = _running(poison=96)
    bad = rig.add([*[1] * 40, 96], max_tokens=10)
    rig.run()
    assert "NaN or Inf" in rig.finished[bad.key].error
    rig.complete(rig.requests[1])


def test_a_quarantined_prompt_is_computed_alone_and_at_once():
    rig = _running()
    rig.add(PROMPT, max_tokens=3)
    rig.run_until(lambda: _between_groups(rig))
    suspect = rig.add([7] * 40, max_tokens=3, suspect=True)
    rig.run_until(lambda: not _between_groups(rig) and _groups(rig)[-1] == (6, 8))
    assert rig.trials == []
    rig.complete()
    assert suspect.key in rig.trials
    assert _groups(rig) == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_pages_of_a_split_prompt_are_kept_for_its_growth():
    rig = _running(new_token_ratio=0.7)
    free = rig.scheduler.free_capacity().num_pages
    rig.add(PROMPT, max_tokens=100)
    rig.run_until(lambda: _between_groups(rig))
    assert rig.scheduler.free_capacity().num_pages < free - 4 - 2
    rig.complete()


def test_without_the_setting_prompts_are_not_split():
    rig = _running(split_prefill_ms=0)
    rig.add(PROMPT, max_tokens=4)
    rig.complete()
    assert ForwardMode.SPLIT not in _modes(rig)


@pytest.mark.parametrize(
    "settings, backend, named",
    [
        ({"parallel": {"tp": 2}}, "native", "engine.parallel.tp: 2"),
        ({"parallel": {"pp": 2}}, "native", "engine.parallel.pp: 2"),
        (
            {"speculative": {"method": "eagle", "draft_model": "head"}},
            "native",
            "engine.speculative.method: eagle",
        ),
        ({"speculative": {"method": "mtp"}}, "native", "engine.speculative.method: mtp"),
        ({}, "transformers", "engine.model_backend: transformers"),
    ],
)
def test_unsupported_models_are_rejected_by_name(settings, backend, named):
    scheduler = {"split_prefill_ms": LIMIT_MS}
    config = EngineConfig.model_validate({"model": "m", "scheduler": scheduler, **settings})
    with pytest.raises(ConfigError, match=f"^{named} is not supported with .*split_prefill_ms"):
        check_features(config, backend)


def test_a_node_rejects_the_setting_before_it_loads_a_model(tmp_path):
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)),
        device="cpu",
        model_backend="transformers",
        scheduler=SchedulerConfig(split_prefill_ms=LIMIT_MS),
    )
    with pytest.raises(ConfigError, match="model_backend: transformers is not supported with"):
        load(config)
