"""In batch-invariant mode a row gives the same bits alone and among others, at widths that fill no vector register."""

import pytest
import torch

from thalweg.models.linear import GroupedLinear, Linear
from thalweg.models.moe import SwiGlu, routed_sum

ROWS = 67


def linear(outputs: int, inputs: int, seed: int) -> Linear:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * inputs**-0.5
    return Linear(weight, batch_invariant=True)


def swiglu(width: int, seed: int) -> SwiGlu:
    return SwiGlu(linear(width, 40, seed), linear(width, 40, seed + 1), linear(40, width, seed + 2), 10.0)


def rows() -> torch.Tensor:
    return torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(9)) * 3


@pytest.mark.parametrize("width", [1, 7, 13, 16, 33, 96])
def test_a_row_through_swiglu_has_the_same_bits_in_any_batch(width: int) -> None:
    layer, x = swiglu(width, 0), rows()
    together = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(ROWS))


@pytest.mark.parametrize("width", [1, 7, 40, 129])
def test_a_row_through_a_product_has_the_same_bits_in_any_batch(width: int) -> None:
    layer, x = linear(width, 40, 3), rows()
    together = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(ROWS))


def test_a_row_through_a_grouped_product_has_the_same_bits_in_any_batch() -> None:
    weight = torch.randn(2 * 9, 20, generator=torch.Generator().manual_seed(1))
    layer, x = GroupedLinear(weight, 2, batch_invariant=True), rows().view(ROWS, 2, 20)
    together = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(ROWS))


def test_what_a_row_gets_from_experts_does_not_depend_on_what_others_chose() -> None:
    experts, x = [swiglu(13, 10 * number) for number in range(5)], rows()
    generator = torch.Generator().manual_seed(2)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(ROWS)])
    weights = torch.rand(ROWS, 3, generator=generator)
    together = routed_sum(x, experts, chosen, weights)
    for row in range(ROWS):
        one = slice(row, row + 1)
        assert torch.equal(routed_sum(x[one], experts, chosen[one], weights[one])[0], together[row])
        expected = sum(weights[row, i] * experts[chosen[row, i]](x[one])[0] for i in range(3))
        torch.testing.assert_close(together[row], expected)
