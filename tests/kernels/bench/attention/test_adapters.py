"""How peers are called, against stand-ins that refuse what the peers refuse and compute what they compute, in float64."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from thalweg.kernels.bench.attention import BENCHMARK, adapters, checks, inputs
from thalweg.kernels.bench.attention.cases import Case, Decode, Prefill
from thalweg.kernels.bench.attention.inputs import Inputs
from thalweg.layouts import sizes, v4, v32

CPU = torch.device("cpu")
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def make(case: Case) -> Inputs:
    return inputs.make(case, 1, CPU, seed=5)[0]


def attend(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out bf16, natural lse without the sink) of q [R, H, D] over keys [R, N, D]."""
    scores = torch.einsum("rhd,rnd->rhn", q.double(), keys.double()) * scale
    with_sink = torch.cat([scores, sink.double().view(1, -1, 1).expand(*scores.shape[:2], 1)], dim=2)
    weights = with_sink.softmax(dim=2)[..., :-1]
    out = torch.einsum("rhn,rnd->rhd", weights, keys[..., :512].double())
    return out.to(torch.bfloat16), torch.logsumexp(scores, dim=2).float()


def read(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Rows [R, N, D] of indices [R, 1, N]."""
    assert indices.dtype == torch.int32 and indices.dim() == 3 and indices.shape[2] % 64 == 0
    assert lengths is None or (lengths.dtype == torch.int32 and bool((lengths == indices.shape[2]).all()))
    layout = v4 if cache.shape[3] == sizes.V4_SLOT_BYTES else v32
    assert layout is v32 or cache.stride(0) % sizes.V4_DATA_BYTES == 0
    return layout.read(cache, indices.flatten()).view(indices.shape[0], indices.shape[2], -1)


class FlashMLA:
    """Stands in for the package: 64 or 128 heads, lists that are multiples of 64, no lengths with v32."""

    def __init__(self) -> None:
        self.schedules: list[object] = []

    def get_mla_metadata(self) -> tuple[object, None]:
        self.schedules.append(object())
        return self.schedules[-1], None

    def flash_mla_with_kvcache(self, **given):
        q = given["q"]
        assert q.shape[1:3] in ((1, 64), (1, 128)) and q.dtype == torch.bfloat16
        assert given["attn_sink"].shape == (q.shape[2],)
        assert given["use_legacy"] and given["is_fp8_kvcache"] and given["head_dim_v"] == 512
        assert given["tile_scheduler_metadata"] in self.schedules
        lengths = given.get("topk_length")
        assert (lengths is None) == (q.shape[3] == 576)
        keys = [read(given["k_cache"], given["indices"], lengths)]
        if "extra_k_cache" in given:
            extra = (given["extra_k_cache"], given["extra_indices_in_kvcache"], given["extra_topk_length"])
            keys.append(read(*extra))
        out, lse = attend(q[:, 0], torch.cat(keys, dim=1), given["attn_sink"], given["softmax_scale"])
        return out.unsqueeze(1), lse.unsqueeze(2)

    def flash_mla_sparse_fwd(self, q, kv, indices, scale, d_v, sink, lengths, *, use_legacy, return_log2_lse):
        assert use_legacy and return_log2_lse and d_v == 512
        assert q.shape[1] in (64, 128) and kv.dtype == torch.bfloat16 and kv.shape[1:] == (1, 512)
        assert indices.dtype == torch.int32 and indices.shape[1] == 1 and indices.shape[2] % 128 == 0
        keys = torch.stack([kv[row[0, :length].long(), 0] for row, length in zip(indices, lengths, strict=True)])
        out, lse = attend(q, keys, sink, scale)
        return out, None, lse / math.log(2)


class Dequant:
    """Stands in for SGLang's kernel that copies slots of a v4 cache to bf16."""

    def __init__(self) -> None:
        self.copied = 0

    def dequantize_k_cache_paged_dsv4(self, pages, slots, page_slots, out) -> None:
        assert pages.is_contiguous() and slots.dtype == torch.int32
        shape, strides = (pages.shape[0], page_slots, 1, 584), (pages.shape[1], 584, 584, 1)
        out.copy_(v4.read(pages.as_strided(shape, strides), slots).unsqueeze(1))
        self.copied += slots.numel()


@pytest.fixture
def flashmla(monkeypatch: pytest.MonkeyPatch) -> FlashMLA:
    package = FlashMLA()
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    return package


@pytest.fixture
def dequant(monkeypatch: pytest.MonkeyPatch) -> Dequant:
    module = Dequant()
    monkeypatch.setitem(sys.modules, "sglang_dequant", module)
    return module


def bound(impl: str, i: Inputs) -> dict[str, adapters.Call]:
    (adapter,) = BENCHMARK.adapters_of(impl)
    return adapter.load()(i)


DECODE = [Decode(2, 64, 192), Decode(2, 64, 128), Decode(1, 128, 1152), Decode(2, 64, 192, "v32")]


@pytest.mark.parametrize("case", DECODE)
def test_flashmla_gets_what_it_takes_and_is_right(case: Decode, flashmla: FlashMLA) -> None:
    i = make(case)
    ((name, call),) = bound("flashmla", i).items()
    assert name == "with_kvcache"
    assert checks.check(i, call(), "sparse_mla")[1] == case.batch


@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (16, 64), (96, 128)])
def test_flashmla_gets_heads_padded_outside_the_call_and_the_variant_says_so(
    heads: int, padded: int, flashmla: FlashMLA, monkeypatch: pytest.MonkeyPatch
) -> None:
    i = make(Decode(2, heads, 192))
    ((name, call),) = bound("flashmla", i).items()
    assert name == f"with_kvcache, padded to {padded}"

    def never(*given: object) -> None:
        raise AssertionError("padded in the call")

    monkeypatch.setattr(torch.nn.functional, "pad", never)
    outputs = call()
    assert outputs["out"].shape == (2, heads, 512)
    checks.check(i, outputs, "sparse_mla")


def test_flashmla_makes_its_schedule_once_for_a_set_of_inputs(flashmla: FlashMLA) -> None:
    (call,) = bound("flashmla", make(Decode(2, 64, 192))).values()
    call(), call()
    assert len(flashmla.schedules) == 1


@pytest.mark.parametrize("case", [Prefill(4, 64, 192), Prefill(3, 16, 1152), Prefill(5, 128, 128)])
def test_the_time_of_a_prefill_by_flashmla_includes_the_copy_of_both_caches(
    case: Prefill, flashmla: FlashMLA, dequant: Dequant
) -> None:
    i = make(case)
    ((name, call),) = bound("flashmla", i).items()
    assert name == ("sparse_fwd, padded to 64" if case.heads == 16 else "sparse_fwd")
    assert dequant.copied == 0
    for times in (1, 2):
        checks.check(i, call(), "sparse_mla")
        named = i.indices.unique().numel() + (i.extra[1].unique().numel() if i.extra is not None else 0)
        assert dequant.copied == times * named


def _parts(given: dict[str, object], extra_indices: str) -> list[Part]:
    first: Part = (given["k_cache"], given["indices"], given["topk_length"])  # type: ignore[assignment]
    if given["extra_k_cache"] is None:
        return [first]
    return [first, (given["extra_k_cache"], given[extra_indices], given["extra_topk_length"])]  # type: ignore[list-item]


def splitk(**given):
    keys = torch.cat([read(*part) for part in _parts(given, "extra_indices_in_kvcache")], dim=1)
    out, lse = attend(given["q"][:, 0], keys, given["attn_sink"], given["softmax_scale"])
    return out.unsqueeze(1), lse.unsqueeze(1)


def portable(**given):
    keys = torch.cat([read(*part) for part in _parts(given, "extra_indices")], dim=1)
    out, lse = attend(given["q"][:, 0], keys, given["attn_sink"], given["softmax_scale"])
    return out.unsqueeze(1), torch.logaddexp(lse, given["attn_sink"].expand_as(lse)).unsqueeze(2)


SGLANG = {
    "sglang-splitk": ("sglang_splitk", SimpleNamespace(triton_fp8_attention_fwd=splitk)),
    "sglang-portable": ("sglang_portable", SimpleNamespace(flash_mla_sparse_decode_triton=portable)),
}


@pytest.mark.parametrize("case", [Decode(2, 8, 192), Decode(2, 64, 128), Decode(1, 16, 1152)])
@pytest.mark.parametrize("impl", SGLANG)
def test_the_kernels_of_sglang_get_what_they_take_and_are_right(
    impl: str, case: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, *SGLANG[impl])
    i = make(case)
    (call,) = bound(impl, i).values()
    assert checks.check(i, call(), "sparse_mla")[1] == case.batch


@pytest.mark.parametrize("impl", SGLANG)
def test_what_autotuned_kernels_choose_from_is_compiled_once_for_a_case(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[adapters.Call] = []
    monkeypatch.setattr(adapters, "compile_at_once", compiled.append)
    monkeypatch.setitem(sys.modules, *SGLANG[impl])
    (adapter,) = BENCHMARK.adapters_of(impl)
    bind = adapter.load()
    for one in inputs.make(Decode(2, 8, 192), 3, CPU, seed=5):
        bind(one)
    assert len(compiled) == 1
    bind(make(Decode(1, 8, 192)))
    assert len(compiled) == 2


@pytest.mark.parametrize("case", [Decode(2, 64, 192, "v32"), Prefill(3, 64, 192)])
@pytest.mark.parametrize("impl", SGLANG)
def test_the_kernels_of_sglang_are_not_asked_for_what_they_do_not_serve(
    impl: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, *SGLANG[impl])
    assert bound(impl, make(case)) == {}


@pytest.mark.parametrize("case", [Decode(2, 8, 192), Decode(1, 8, 192, "v32"), Prefill(3, 8, 192)])
def test_ours_runs_here_and_is_right(case: Case) -> None:
    i = make(case)
    (call,) = bound("thalweg", i).values()
    checks.check(i, call(), "sparse_mla")


@pytest.mark.parametrize("impl", ["flashmla", "sglang-splitk", "sglang-portable"])
def test_a_peer_that_cannot_be_imported_says_which_module_is_missing(impl: str) -> None:
    (adapter,) = BENCHMARK.adapters_of(impl)
    with pytest.raises(ModuleNotFoundError):
        adapter.load()
    assert adapter.install
