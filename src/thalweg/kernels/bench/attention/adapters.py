"""How each implementation of attention over index lists is called: bound to one set of inputs, one call a variant.

What a serving step prepares once for all layers lies outside the call: FlashMLA's schedule, which its first call makes and
SGLang keeps for a step; q padded to the heads that FlashMLA has; the lists that prefill reads its copy by. Making that bf16 copy
of the caches lies inside: every layer makes its own.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from thalweg import ops
from thalweg.kernels.bench.attention.cases import Case, Prefill
from thalweg.kernels.bench.attention.inputs import Inputs
from thalweg.kernels.bench.autotuned import compile_at_once
from thalweg.kernels.bench.benchmark import Adapter, Bind, import_first
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.layouts import sizes
from thalweg.ops import dispatch

VALUE_DIM = sizes.LATENT_DIM
FLASHMLA_HEADS = (64, 128)
PREFILL_LIST_ALIGNMENT = 128


def _thalweg() -> Bind:
    def bind(inputs: Inputs) -> dict[str, Call]:
        i = inputs

        def call() -> Outputs:
            out, lse = ops.sparse_mla(i.q, i.cache, i.indices, i.lengths, i.sink, i.extra, scale=i.scale)
            return {"out": out, "lse": lse}

        chosen, why = dispatch.resolve("sparse_mla", i.q.device)
        if chosen.name == "reference" and i.q.is_cuda:
            raise RuntimeError(f"only the reference runs here, which nobody should time: {why}")
        return {chosen.name: call}

    return bind


def _flashmla() -> Bind:
    flash_mla: Any = importlib.import_module("flash_mla")

    def bind(inputs: Inputs) -> dict[str, Call]:
        heads = inputs.case.heads
        padded = next(count for count in FLASHMLA_HEADS if count >= heads)
        bound = flashmla_prefill if isinstance(inputs.case, Prefill) else flashmla_decode
        name = "sparse_fwd" if isinstance(inputs.case, Prefill) else "with_kvcache"
        name += "" if padded == heads else f", padded to {padded}"
        return {name: bound(flash_mla, inputs, padded)}

    return bind


def flashmla_decode(flash_mla: Any, inputs: Inputs, padded: int) -> Call:
    """A call of FlashMLA's sparse decode with q and sink padded to `padded` heads."""
    heads, (q, sink) = inputs.case.heads, _padded(inputs, padded)
    schedule, _ = flash_mla.get_mla_metadata()  # empty: its first call fills it
    arguments = {
        "q": q.unsqueeze(1),
        "k_cache": inputs.cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": VALUE_DIM,
        "tile_scheduler_metadata": schedule,
        "softmax_scale": inputs.scale,
        "is_fp8_kvcache": True,
        "indices": inputs.indices.unsqueeze(1),
        "attn_sink": sink,
        "use_legacy": True,
    }
    if inputs.case.layout == "v4":  # its V3.2 kernel knows no lengths: all entries count
        arguments["topk_length"] = inputs.lengths
    if inputs.extra is not None:
        cache, indices, lengths = inputs.extra
        arguments["extra_k_cache"] = cache
        arguments["extra_indices_in_kvcache"] = indices.unsqueeze(1)
        arguments["extra_topk_length"] = lengths

    def call() -> Outputs:
        out, lse = flash_mla.flash_mla_with_kvcache(**arguments)
        return {"out": out[:, 0, :heads], "lse": lse[:, :heads, 0]}

    return call


def flashmla_prefill(flash_mla: Any, inputs: Inputs, padded: int) -> Call:
    """SGLang's way of a prefill chunk: both caches to one bf16 copy by its own kernel, then FlashMLA's sparse prefill."""
    dequant: Any = import_first("sglang_dequant", "sglang.kernels.ops.attention.dsv4.dequant_k_cache")
    heads, (q, sink) = inputs.case.heads, _padded(inputs, padded)
    parts, lists, copied = [], [], 0
    for cache, indices in [(inputs.cache, inputs.indices), *([] if inputs.extra is None else [inputs.extra[:2]])]:
        slots, where = torch.unique(indices, return_inverse=True)
        pages = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
        parts.append((pages, slots.to(torch.int32), cache.shape[1]))
        lists.append(where + copied)
        copied += slots.numel()
    copy = torch.empty(copied, 1, VALUE_DIM, dtype=torch.bfloat16, device=q.device)
    lengths = torch.full((inputs.case.rows,), inputs.case.entries, dtype=torch.int32, device=q.device)
    padding = -inputs.case.entries % PREFILL_LIST_ALIGNMENT
    combined = torch.nn.functional.pad(torch.cat(lists, dim=1).to(torch.int32), (0, padding), value=-1).unsqueeze(1)
    places = copy.split([slots.numel() for _, slots, _ in parts])

    def call() -> Outputs:
        for (pages, slots, page_slots), place in zip(parts, places, strict=True):
            dequant.dequantize_k_cache_paged_dsv4(pages, slots, page_slots, out=place)
        out, _, lse = flash_mla.flash_mla_sparse_fwd(
            q, copy, combined, inputs.scale, VALUE_DIM, sink, lengths, use_legacy=True, return_log2_lse=True
        )
        return {"out": out[:, :heads], "lse_log2": lse[:, :heads]}

    return call


def _padded(inputs: Inputs, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and sink with `heads` heads, zeros for those that are not there."""
    more = heads - inputs.case.heads
    if not more:
        return inputs.q, inputs.sink
    pad = torch.nn.functional.pad
    return pad(inputs.q, (0, 0, 0, more)), pad(inputs.sink, (0, more))


def _sglang_splitk() -> Bind:
    module = import_first("sglang_splitk", "sglang.kernels.ops.attention.dsv4.triton_sparse_decode")
    autotuned = _autotuned()

    def bind(inputs: Inputs) -> dict[str, Call]:
        if not _is_v4_decode(inputs):
            return {}
        cache, indices, lengths = _extra_or_none(inputs)
        arguments = {
            "q": inputs.q.unsqueeze(1),
            "k_cache": inputs.cache,
            "head_dim_v": VALUE_DIM,
            "softmax_scale": inputs.scale,
            "indices": inputs.indices.unsqueeze(1),
            "attn_sink": inputs.sink,
            "extra_k_cache": cache,
            "extra_indices_in_kvcache": indices,
            "topk_length": inputs.lengths,
            "extra_topk_length": lengths,
        }

        def call() -> Outputs:
            out, lse = module.triton_fp8_attention_fwd(**arguments)
            return {"out": out[:, 0], "lse": lse[:, 0]}

        return autotuned(inputs.case, call)

    return bind


def _sglang_portable() -> Bind:
    module = import_first("sglang_portable", "sglang.kernels.ops.attention.flash_mla_sm120_triton")
    autotuned = _autotuned()

    def bind(inputs: Inputs) -> dict[str, Call]:
        if not _is_v4_decode(inputs):
            return {}
        cache, indices, lengths = _extra_or_none(inputs)
        arguments = {
            "q": inputs.q.unsqueeze(1),
            "k_cache": inputs.cache,
            "indices": inputs.indices.unsqueeze(1),
            "topk_length": inputs.lengths,
            "attn_sink": inputs.sink,
            "head_dim_v": VALUE_DIM,
            "softmax_scale": inputs.scale,
            "extra_k_cache": cache,
            "extra_indices": indices,
            "extra_topk_length": lengths,
        }

        def call() -> Outputs:
            out, lse = module.flash_mla_sparse_decode_triton(**arguments)
            return {"out": out[:, 0], "lse_with_sink": lse[:, :, 0]}

        return autotuned(inputs.case, call)

    return bind


def _autotuned() -> Callable[[Case, Call], dict[str, Call]]:
    """A function that names the variant of a call to autotuned kernels, and compiles what they choose from once for a case."""
    compiled: set[Case] = set()

    def variant(case: Case, call: Call) -> dict[str, Call]:
        if case not in compiled:
            compile_at_once(call)
            compiled.add(case)
        return {"triton, autotuned": call}

    return variant


def _is_v4_decode(inputs: Inputs) -> bool:
    """SGLang's Triton kernels read v4 alone, and a chunk of prefill goes to FlashMLA there."""
    return inputs.case.layout == "v4" and not isinstance(inputs.case, Prefill)


def _extra_or_none(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The second cache, its indices [R, 1, K] and lengths."""
    if inputs.extra is None:
        return None, None, None
    cache, indices, lengths = inputs.extra
    return cache, indices.unsqueeze(1), lengths


ADAPTERS = (
    Adapter("thalweg", "sparse_mla", _thalweg),
    Adapter("flashmla", "sparse_mla", _flashmla, "sgl-flash-mla (the release for your torch)"),
    Adapter("sglang-splitk", "sparse_mla", _sglang_splitk, "sglang"),
    Adapter("sglang-portable", "sparse_mla", _sglang_portable, "sglang"),
)
