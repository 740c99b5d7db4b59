"""Every operation is a torch.library operation whose schema and fake are true, so torch.compile and export may see it.

The same cases run on a GPU where there is one, and give what the CPU gives.
"""

import pytest
import torch

import thalweg.ops
from thalweg.layouts import exact, v4

FREQUENCIES = torch.tensor([1.0, 0.1])


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def arguments() -> dict[str, tuple]:
    torch.manual_seed(0)
    streams, y, post, comb = torch.randn(3, 4, 8), torch.randn(3, 8), torch.rand(3, 4), torch.rand(3, 4, 4)
    mixer = (torch.randn(24, 32), torch.randn(3), torch.randn(24))
    keys = exact.allocate(3, 64, 128)  # opcheck compares arguments, which torch cannot do for e4m3
    exact.write(keys, torch.arange(64, 192), torch.randn(128, 128))
    main = v4.allocate(3, 64)
    v4.write(main, torch.arange(64, 192), torch.randn(128, 512))
    q, weights = torch.randn(2, 16, 128), torch.randn(2, 16)
    table, lengths = integers(1, 2).view(2, 1), integers(64, 5)
    latent = exact.allocate(3, 16, 576)
    exact.write(latent, torch.arange(16, 48), torch.randn(32, 576))
    small = exact.allocate(2, 8, 8)
    return {
        "mhc_pre": (streams, *mixer, 1e-6, 1e-6, 20, None),
        "mhc_post": (y, streams, post, comb, None),
        "mhc_post_pre_norm": (y, streams, post, comb, *mixer, torch.rand(8), 1e-6, 1e-6, 20, None),
        "mhc_head": (streams, torch.randn(4, 32), torch.randn(1), torch.randn(4), 1e-6, 1e-6, None),
        "norm_rope_store": (y, torch.rand(8), FREQUENCIES, integers(0, 1, 2), small, integers(8, 9, -1), 1e-6, None),
        "norm_rope_q": (torch.randn(3, 2, 8), FREQUENCIES, integers(0, 1, 2), 1e-6, None),
        "rope_quantise_index_q": (streams, post, FREQUENCIES, integers(0, 1, 2), True, True, None),
        "compress": (
            *(torch.randn(5, 16), torch.randn(5, 16), torch.zeros(2, 8, 2, 16), torch.randn(4, 16)),
            *(torch.arange(5), torch.ones(5, dtype=torch.int64), integers(-1, -1, -1, 8, -1)),
            *(torch.rand(8), FREQUENCIES, small, 4, False, 1e-6, None),
        ),
        "mqa_logits": (q, keys, weights, lengths, table, None, torch.zeros(2, 64), True, None),
        "mqa_logits_ragged": (
            *(q, torch.randn(9, 128), None, weights),
            *(integers(0, 4), integers(9, 4), torch.zeros(2, 9), None),
        ),
        "topk": (torch.randn(2, 64), lengths, 7, False, False, None),
        "index_topk": (q, keys, weights, lengths, table, 7, None, 64, False, None),
        "sparse_mla": (
            *(torch.randn(2, 4, 512), main, integers(64, 65, -1, 66).view(2, 2), None, torch.randn(4)),
            *(main, integers(70, 71).view(2, 1), integers(1, 0), 0.04, True, integers(3, 9), torch.rand(32), None),
        ),
        "mla_verify": (
            *(torch.randn(2, 3, 4, 576), latent, integers(1, 2).view(2, 1), integers(5, 9)),
            *(torch.arange(-1, 2).expand(2, 3), None, 0.04, None),
        ),
        "kv_compact": ([main, main.clone()], integers(64, 65), integers(66, -1), None),
    }


CASES = arguments()


def test_every_operation_has_a_case_here() -> None:
    assert {choice.operation for choice in thalweg.ops.explain("cpu")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_schema_and_fake_are_true(name: str) -> None:
    operation = getattr(torch.ops.thalweg, name).default
    torch.library.opcheck(operation, CASES[name], test_utils=("test_schema", "test_faketensor"))


def on_gpu(value: object) -> object:
    if isinstance(value, list):
        return [on_gpu(entry) for entry in value]
    if not isinstance(value, torch.Tensor):
        return value
    # A clone of a paged view would lose its page stride: the storage moves, the view is made again.
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).cuda()
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_gives_what_the_cpu_gives(name: str) -> None:
    operation = getattr(torch.ops.thalweg, name).default
    arguments_gpu = [on_gpu(value) for value in arguments()[name]]
    arguments_cpu = arguments()[name]
    results = operation(*arguments_cpu), operation(*arguments_gpu)
    pairs = [*zip(arguments_cpu, arguments_gpu, strict=True)]  # arguments: what was changed in place
    if results[0] is not None:
        pairs += zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True)
    for cpu, gpu in pairs:
        if isinstance(cpu, torch.Tensor):
            if cpu.dtype == torch.float8_e4m3fn:
                cpu, gpu = cpu.float(), gpu.float()
            torch.testing.assert_close(gpu.cpu(), cpu, equal_nan=True)
        elif isinstance(cpu, list):
            assert all(torch.equal(b.cpu(), a) for a, b in zip(cpu, gpu, strict=True))
