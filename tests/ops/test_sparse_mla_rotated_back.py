"""Results that leave sparse_mla turned back by their row's position: by every implementation as by the formula."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.ops import emulated
from tests.ops.attention_inputs import attention, filled, live_rows
from tests.ops.attention_kernels import DEVICE, SCALE, Inputs, agrees, back_from, check, made
from tests.ops.builders import randn, seeded
from thalweg.errors import UserError
from thalweg.ops import sparse_mla
from thalweg.ops.cuda import CudaVariant
from thalweg.ops.sparse_mla import hopper
from thalweg.ops.sparse_mla import triton as kernels

POSITIONS = (0, 7, 131_071, 1_048_575, 300_000)


@pytest.mark.parametrize("layout", ["v4", "exact"])
def test_the_reference_turns_pairs_of_the_last_channels_by_minus_the_angle(layout: str) -> None:
    """As complex numbers, in float64; angles are float32 products, of which position 131,071 leaves 2^-7."""
    g = seeded(4)
    cache, known = filled(g, layout, 3, 16)
    q, sink, indices = randn(g, 3, 4, 512) * 2, randn(g, 4), torch.tensor(sorted(known))[:15].view(3, 5)
    positions, frequencies = back_from(0, 7, 131_071)
    out, lse = sparse_mla(q, cache, indices, sink=sink, scale=512**-0.5, rotate_back=(positions, frequencies))
    for row in range(3):
        want, want_lse = attention(q[row], live_rows(indices[row], None, known), sink, 512**-0.5)
        angle = (positions[row].float() * frequencies).double().numpy()
        turned = (want[:, 448::2] + 1j * want[:, 449::2]) * np.exp(-1j * angle)
        want[:, 448::2], want[:, 449::2] = turned.real, turned.imag
        np.testing.assert_allclose(out[row].numpy(), want, rtol=2e-7, atol=5e-7)
        np.testing.assert_allclose(lse[row].numpy(), want_lse, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize(("split", "dtype"), [(1, torch.int64), (2, torch.int32), (5, torch.int64)])
def test_the_kernels_turn_back_with_and_without_splits(
    split: int, dtype: torch.dtype, splits: dict[str, int], spoiled_attention: None
) -> None:
    splits["of"] = split
    inputs = made("v4", 5, 5, 70, 45)
    inputs.rotate_back = back_from(*POSITIONS, dtype=dtype)
    out, lse = check(inputs)
    plain_out, plain_lse = dataclasses.replace(inputs, rotate_back=None).run("triton")
    assert torch.equal(out[..., :448], plain_out[..., :448]) and torch.equal(lse, plain_lse)
    assert torch.equal(out[0], plain_out[0])  # position 0
    assert all((out[row, :, 448:] != plain_out[row, :, 448:]).any() for row in range(1, 5))
    check(dataclasses.replace(inputs, sink=None, lengths=torch.tensor([70, 0, 3, 41, -2])))


def test_a_row_of_nothing_stays_zero(splits: dict[str, int]) -> None:
    for splits["of"] in (1, 3):
        inputs = made("v4", 2, 3, 40)
        inputs.indices[1] = -1
        inputs.rotate_back = back_from(5, 9)
        out, lse = check(inputs)
        assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_slabs_of_rows_take_their_own_positions(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows at once as scratch holds: here two."""
    inputs = made("v4", 5, 2, 300)
    inputs.rotate_back = back_from(*POSITIONS)
    together = check(inputs, deterministic=deterministic)
    monkeypatch.setattr(kernels.choices, "SCRATCH_BYTES", 2 * 3 * 2 * 512 * 4)
    in_slabs = check(inputs, deterministic=deterministic)
    if deterministic:
        assert torch.equal(in_slabs[0], together[0])
        alone = inputs.part(slice(3, 4)).run("triton", deterministic=True)
        assert torch.equal(alone[0][0], together[0][3])


@pytest.mark.skipif(emulated.MISSING is not None, reason=str(emulated.MISSING))
@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels run on the GPU here, the emulation on the CPU")
@pytest.mark.parametrize("split", [1, 3])
def test_hoppers_results_are_turned_back_by_the_merge_or_after_it(
    split: int, splits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without splits one more launch turns what was rounded: a second rounding."""
    splits["of"] = split
    monkeypatch.setattr(CudaVariant, "launch", emulated.launch)
    inputs = made("v4", 2, 16, 200, 150)
    inputs.rotate_back = back_from(7, 131_071)
    lists = (inputs.q, inputs.cache, inputs.indices, inputs.lengths, inputs.sink, *(inputs.extra or ()))
    arguments = (*lists, 512**-0.5, False, *inputs.rotate_back)
    assert hopper.rejects(*arguments) is None
    agrees(hopper.sparse_mla(*arguments), inputs.run("reference"))


def rejected(inputs: Inputs, implementation: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        inputs.run(implementation)


def test_what_cannot_be_turned_back_is_refused() -> None:
    inputs = made("v4", 2, 2, 8)
    positions, frequencies = back_from(1, 2)
    inputs.rotate_back = positions, frequencies[:16]
    rejected(inputs, "triton", "16 inverse frequencies, they turn back 32 pairs of channels")
    assert math.isfinite(float(inputs.run("reference")[0].sum()))
    inputs.rotate_back = positions[:1], frequencies
    with pytest.raises(ValueError, match=r"positions: got shape \[1\], needs \[2\]"):
        inputs.run("reference")
    inputs.rotate_back = positions.float(), frequencies
    with pytest.raises(ValueError, match=r"positions: got torch\.float32"):
        inputs.run("reference")
    inputs = made("v32", 2, 2, 8)
    inputs.rotate_back = positions, frequencies
    with pytest.raises(ValueError, match="rows of 576, whose values lack the rope channels"):
        inputs.run("reference")


def test_half_of_what_a_turn_needs_is_no_turn_left_out() -> None:
    inputs = made("v4", 1, 2, 64)
    with pytest.raises(ValueError, match="rotate_back: got None in it, needs positions and inverse_frequencies"):
        sparse_mla(
            inputs.q, inputs.cache, inputs.indices, scale=SCALE, rotate_back=(torch.zeros(1, dtype=torch.int32), None)
        )
