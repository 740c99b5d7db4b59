"""Sampling against probabilities worked out by hand and against the frequencies of many draws."""

import math

import pytest
import torch

from thalweg.engine.params import LOWEST_TEMPERATURE, Sampling
from thalweg.engine.sampler import Sampler, filtered_probabilities, penalise
from thalweg.errors import UserError

# softmax of these is 0.5, 0.25, 0.125, 0.125, in another order
LOGITS = torch.tensor([math.log(0.125), math.log(0.5), math.log(0.125), math.log(0.25)])


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    assert Sampler(Sampling())(LOGITS).token == 1
    assert Sampler(Sampling())(torch.tensor([0.0, 2.0, 2.0])).token == 1


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.125, 0.5, 0.125, 0.25]),
        (Sampling(temperature=1.0, top_k=2), [0, 2 / 3, 0, 1 / 3]),
        # 0.5 reaches 0.4 alone; 0.5 does not reach 0.6, with 0.25 it does
        (Sampling(temperature=1.0, top_p=0.4), [0, 1, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.6), [0, 2 / 3, 0, 1 / 3]),
        # temperature 0.5 squares: 4 : 16 : 4... of 1/64, 16/64, 1/64, 4/64
        (Sampling(temperature=0.5), [1 / 22, 16 / 22, 1 / 22, 4 / 22]),
        # temperature before top-p: 16/22 = 0.727 alone reaches 0.7
        (Sampling(temperature=0.5, top_p=0.7), [0, 1, 0, 0]),
        # min-p: 0.4 times the best is 0.2; 0.25 is more, 0.125 is not
        (Sampling(temperature=1.0, min_p=0.4), [0, 2 / 3, 0, 1 / 3]),
        (Sampling(temperature=1.0, min_p=1.0), [0, 1, 0, 0]),
        # a tie at the edge of top-k goes to the lower id
        (Sampling(temperature=1.0, top_k=3), [1 / 7, 4 / 7, 0, 2 / 7]),
    ],
)
def test_filters_leave_the_probabilities_worked_out_by_hand(sampling: Sampling, expected: list[float]) -> None:
    torch.testing.assert_close(
        filtered_probabilities(LOGITS, sampling), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    draws = torch.tensor([sampler(LOGITS).token for _ in range(4000)])
    expected = torch.tensor([0.125, 0.5, 0.125, 0.25]) * 4000
    counts = torch.bincount(draws, minlength=4).float()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 0.1% of true samplers exceed it, at 3 degrees of freedom


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"temperature": 1e-31},
        {"seed": 2**64},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": math.nan},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="possible is"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_penalties_change_the_logits_worked_out_by_hand() -> None:
    """Prompt 0, output 1, 1, 2. Repetition 2 halves positive and doubles negative logits of 0, 1, 2; presence 0.5 is taken
    from 1 and 2 once; frequency 0.25 from 1 twice and from 2 once."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([1.0, -1.0, 4.0, 3.0], dtype=torch.float64)
    changed = penalise(logits, sampling, [0], [1, 1, 2])
    assert changed.tolist() == [0.5, -2.0 - 0.5 - 0.5, 2.0 - 0.5 - 0.25, 3.0]
    assert logits.tolist() == [1.0, -1.0, 4.0, 3.0]


def test_a_penalised_token_gives_way_when_greedy() -> None:
    sampler = Sampler(Sampling(presence_penalty=2.0))
    assert sampler(LOGITS, [], []).token == 1
    assert sampler(LOGITS, [1], []).token == 1, "presence counts the output alone"
    assert sampler(LOGITS, [], [1]).token == 3


@pytest.mark.parametrize("temperature", [LOWEST_TEMPERATURE, 1e-6, 1e30, 1e308])
def test_every_temperature_that_is_taken_gives_probabilities(temperature: float) -> None:
    for logits in (LOGITS, torch.tensor([3.4e38, -3.4e38, 0.0, 3.4e38])):
        probabilities = filtered_probabilities(logits, Sampling(temperature=temperature))
        assert float(probabilities.sum()) == pytest.approx(1.0) and bool((probabilities >= 0).all())


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**64 - 1])
def test_every_seed_that_is_taken_draws(seed: int) -> None:
    assert Sampler(Sampling(temperature=1.0, seed=seed))(LOGITS).token in range(4)
