"""The cost model of simulated nodes."""

import pytest

from simulation.cost import StepCost, StepShape


def test_a_gpu_model_or_number_of_ranks_that_is_not_supported_is_named():
    for arguments, name in (
        (("h1000", "llama-3-8b"), "h1000"),
        (("h100", "llama-9"), "llama-9"),
        (("h100", "llama-3-8b", 3), "tp 3"),
        (("h100", "llama-3-70b"), "does not fit"),
    ):
        with pytest.raises(ValueError, match=name):
            StepCost.of(*arguments)
    with pytest.raises(ValueError, match="pigeon"):
        StepCost.of("h100", "llama-3-8b").transfer_s(1, "pigeon")


def test_a_decode_step_costs_what_reading_weights_and_kv_takes():
    cost = StepCost.of("h100", "llama-3-8b")
    alone = cost.step_s(StepShape((1,), (500,)))
    assert alone == pytest.approx(6.7e-3, rel=0.05)
    assert cost.step_s(StepShape((1,) * 64, (4000,) * 64)) > 1.5 * alone
    assert cost.kv_bytes_per_token == 131072
