"""How each implementation is called. An adapter imports its package when it is asked for, and binds it to one set of inputs.

`bind(inputs)` gives a call for each variant; the caller keeps the fastest that is right. What a serving step prepares once for
all layers lies outside the call, but for DeepGEMM's metadata kernel, which is counted. A peer's dead columns and pages are
what they are: unwritten scores hold a huge number, so whoever ignores the lengths is found out.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from thalweg import ops
from thalweg.kernels.bench.benchmark import Adapter, Bind, import_first
from thalweg.kernels.bench.clock import Call, Outputs
from thalweg.kernels.bench.index.cases import PAGE_KEYS
from thalweg.kernels.bench.index.inputs import Inputs
from thalweg.ops import dispatch


def _thalweg(op: str) -> Callable[[], Bind]:
    def bind(inputs: Inputs) -> dict[str, Call]:
        i, k = inputs, inputs.case.k
        scoring = (i.q, i.cache, i.weights, i.lengths, i.page_table)

        def mqa_logits() -> Outputs:
            return {"logits": ops.mqa_logits(*scoring, i.row_to_request, out=i.out)}

        def topk() -> Outputs:
            return {"indices": ops.topk(i.logits, i.lengths, k)}

        def index_topk() -> Outputs:
            indices, slots = ops.index_topk(*scoring, k, i.row_to_request)
            return {"indices": indices, "slots": slots}

        chosen, why = dispatch.resolve(op, i.q.device)
        if chosen.name == "reference" and i.q.is_cuda:
            raise RuntimeError(f"only the reference runs here, which nobody should time: {why}")
        return {chosen.name: {"mqa_logits": mqa_logits, "topk": topk, "index_topk": index_topk}[op]}

    return lambda: bind


def _deepgemm() -> Bind:
    deep_gemm: Any = importlib.import_module("deep_gemm")
    processors = deep_gemm.get_num_sms()

    def bind(inputs: Inputs) -> dict[str, Call]:
        def call_of(rows_of_one: int) -> Call:
            q = inputs.q.unflatten(0, (-1, rows_of_one))
            lengths = inputs.lengths.view(-1, rows_of_one)
            table = inputs.table_of_rows(rows_of_one)
            cache, weights, width = inputs.cache, inputs.weights, inputs.logits.shape[1]

            def call() -> Outputs:
                plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_KEYS, processors)
                return {"logits": deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, plan, width, False)}

            return call

        # It scores one or two rows a request at a time; more are handed over as more requests.
        counts = (1, 2) if inputs.case.rows % 2 == 0 else (1,)
        return {f"next_n={count}": call_of(count) for count in counts}

    return bind


def _tilelang() -> Bind:
    module = import_first("sglang_tilelang", "sglang.kernels.ops.attention.dsa.tilelang_kernel")

    def bind(inputs: Inputs) -> dict[str, Call]:
        q, table, width = inputs.q.unsqueeze(1), inputs.table_of_rows(), inputs.logits.shape[1]

        def call() -> Outputs:
            args = (q, inputs.cache, inputs.weights, inputs.lengths, table, None, width)
            return {"logits": module.tilelang_fp8_paged_mqa_logits(*args, clean_logits=False)}

        return {"sglang": call}

    return bind


def _sglang_topk() -> Bind:
    module = import_first("sglang_topk", "sglang.kernels.ops.attention.dsv4.topk")

    def bind(inputs: Inputs) -> dict[str, Call]:
        logits, lengths, table = inputs.logits, inputs.lengths, inputs.table_of_rows()
        slots = torch.empty(inputs.case.total_rows, inputs.case.k, dtype=torch.int32, device=logits.device)
        # Made by the first call, which no graph records: SGLang plans once a step, for all layers.
        plan = functools.cache(lambda: module.plan_topk_v2(lengths))

        def v1() -> Outputs:
            module.topk_transform_paged(logits, lengths, table, slots, PAGE_KEYS)
            return {"slots": slots}

        def v2() -> Outputs:
            module.topk_transform_paged_v2(logits, lengths, table, slots, PAGE_KEYS, plan())
            return {"slots": slots}

        return {"v1": v1, "v2": v2}

    return bind


def _flashinfer() -> Bind:
    module: Any = importlib.import_module("flashinfer.topk")

    def bind(inputs: Inputs) -> dict[str, Call]:
        offsets = torch.zeros_like(inputs.lengths)

        def call_of(graph_safe: bool) -> Call:
            def call() -> Outputs:
                args = (inputs.logits, offsets, inputs.lengths, inputs.case.k)
                return {"indices": module.top_k_ragged_transform(*args, dsa_graph_safe=graph_safe)}

            return call

        return {"ragged": call_of(False), "ragged, graph safe": call_of(True)}

    return bind


def _torch() -> Bind:
    def bind(inputs: Inputs) -> dict[str, Call]:
        # torch.topk knows no lengths: it reads the whole width, and whoever wrote the scores has written -inf past them.
        column = torch.arange(inputs.logits.shape[1], device=inputs.logits.device)
        inputs.logits.masked_fill_(column >= inputs.case.keys, float("-inf"))
        k = min(inputs.case.k, inputs.case.keys)
        padding = (0, inputs.case.k - k)

        def call() -> Outputs:
            indices = torch.topk(inputs.logits, k, dim=1, sorted=False).indices
            return {"indices": torch.nn.functional.pad(indices, padding, value=-1) if padding[1] else indices}

        return {"topk": call}

    return bind


ADAPTERS = (
    Adapter("thalweg", "mqa_logits", _thalweg("mqa_logits")),
    Adapter("thalweg", "topk", _thalweg("topk")),
    Adapter("thalweg", "index_topk", _thalweg("index_topk")),
    Adapter("deepgemm", "mqa_logits", _deepgemm, "sgl-deep-gemm (the release for your torch) and apache-tvm-ffi"),
    Adapter("tilelang", "mqa_logits", _tilelang, "tilelang and sglang, whose indexer it is"),
    Adapter("sglang-topk", "topk", _sglang_topk, "sglang"),
    Adapter("flashinfer", "topk", _flashinfer, "flashinfer-python"),
    Adapter("torch", "topk", _torch),
)
