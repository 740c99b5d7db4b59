"""Every public operation refuses arguments that do not fit with a ValueError that names them: given and needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops.builders import frequencies
from thalweg import ops
from thalweg.layouts import exact, index_fp8, v4

Z = torch.zeros
I32, E4M3 = torch.int32, torch.float8_e4m3fn


def plan(rows: int = 4, **changes: torch.Tensor) -> ops.CompressPlan:
    fields = {
        "positions": torch.arange(rows),
        "state_slots": Z(rows, dtype=I32),
        "cache_slots": torch.full((rows,), -1),
    }
    return ops.CompressPlan(**{**fields, **changes})


def mixer(rows: int = 24, scales: int = 3) -> dict[str, Any]:
    return {"fn": Z(rows, 64), "scale": Z(scales), "base": Z(rows)}


def indexer() -> dict[str, Any]:
    return {
        "q": Z(3, 16, 128).to(E4M3),
        "cache": index_fp8.allocate(3),
        "weights": Z(3, 16),
        "lengths": Z(3, dtype=I32),
        "page_table": Z(3, 2, dtype=I32),
    }


post = {"y": Z(5, 16), "streams": Z(5, 4, 16), "post": Z(5, 4), "comb": Z(5, 4, 4)}
VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "mhc_pre": lambda: {"streams": Z(5, 4, 16), **mixer()},
    "mhc_post": lambda: dict(post),
    "mhc_post_pre_norm": lambda: {**post, **mixer(), "norm_weight": Z(16)},
    "mhc_head": lambda: {"streams": Z(5, 4, 16), **mixer(4, 1)},
    "compress": lambda: {
        "kv": Z(4, 1024), "gate": Z(4, 1024), "state": Z(2, 8, 2, 1024), "ape": Z(4, 1024), "plan": plan(),
        "norm_weight": Z(512), "inverse_frequencies": frequencies(), "cache": v4.allocate(2, 4), "ratio": 4,
    },
    "norm_rope_store": lambda: {
        "kv": Z(3, 512), "norm_weight": Z(512), "inverse_frequencies": frequencies(), "positions": torch.arange(3),
        "cache": v4.allocate(2, 4), "slots": torch.arange(3),
    },
    "norm_rope_q": lambda: {
        "q": Z(3, 2, 512), "inverse_frequencies": frequencies(), "positions": torch.arange(3)
    },
    "rope_quantise_index_q": lambda: {
        "q": Z(3, 16, 128), "weights": Z(3, 16), "inverse_frequencies": frequencies(), "positions": torch.arange(3),
        "hadamard": True, "quantise": True,
    },
    "mqa_logits": indexer,
    "mqa_logits_ragged": lambda: {
        "q": Z(3, 16, 128).to(E4M3), "keys": Z(9, 128).to(E4M3), "scales": Z(9), "weights": Z(3, 16),
        "starts": Z(3, dtype=I32), "ends": Z(3, dtype=I32),
    },
    "topk": lambda: {"logits": Z(3, 10), "lengths": Z(3, dtype=I32), "k": 2},
    "index_topk": lambda: {**indexer(), "k": 2},
    "sparse_mla": lambda: {
        "q": Z(3, 4, 512), "cache": v4.allocate(2, 4), "indices": torch.full((3, 5), -1), "lengths": Z(3, dtype=I32),
        "sink": Z(4), "extra": (v4.allocate(2, 4), torch.full((3, 2), -1), Z(3, dtype=I32)), "scale": 1.0,
    },
    "kv_compact": lambda: {"caches": [v4.allocate(2, 4)], "sources": torch.tensor([1]), "targets": torch.tensor([2])},
}  # fmt: skip

# (operation, argument, what is given instead, what the message must say)
WRONG: list[tuple[str, str, Any, str]] = [
    ("mhc_pre", "streams", Z(5, 16), r"streams.*\[5, 16\].*\[any, any, any\]"),
    ("mhc_pre", "streams", Z(5, 4, 16, dtype=torch.int32), r"streams.*int32.*float32"),
    ("mhc_pre", "fn", Z(24, 63), r"fn.*\[24, 63\].*\[24, 64\]"),
    ("mhc_pre", "fn", Z(4, 64), r"fn.*\[4, 64\].*\[24, 64\]"),
    ("mhc_pre", "fn", Z(24, 64, dtype=torch.int64), "fn.*int64.*float32"),
    ("mhc_pre", "scale", Z(1), r"scale.*\[1\].*\[3\]"),
    ("mhc_pre", "base", Z(23), r"base.*\[23\].*\[24\]"),
    ("mhc_pre", "iterations", 0, "iterations.*0.*at least 1"),
    ("mhc_pre", "base", Z(24, device="meta"), "different devices.*meta"),
    ("mhc_post", "y", Z(4, 16), r"y.*\[4, 16\].*\[5, 16\]"),
    ("mhc_post", "post", Z(5, 3), r"post.*\[5, 3\].*\[5, 4\]"),
    ("mhc_post", "comb", Z(5, 16), r"comb.*\[5, 16\].*\[5, 4, 4\]"),
    ("mhc_post", "comb", Z(5, 4, 4, device="meta"), "different devices.*meta"),
    ("mhc_post_pre_norm", "norm_weight", Z(15), r"norm_weight.*\[15\].*\[16\]"),
    ("mhc_post_pre_norm", "norm_weight", Z(16, device="meta"), "different devices.*meta"),
    ("mhc_post_pre_norm", "comb", Z(5, 4, 3), r"comb.*\[5, 4, 3\].*\[5, 4, 4\]"),
    ("mhc_post_pre_norm", "iterations", -1, "iterations.*-1.*at least 1"),
    ("mhc_head", "fn", Z(24, 64), r"fn.*\[24, 64\].*\[4, 64\]"),
    ("mhc_head", "scale", Z(3), r"scale.*\[3\].*\[1\]"),
    ("mhc_head", "streams", Z(5, 4, 16, dtype=torch.float16), "streams.*float16.*float32"),
    ("compress", "kv", Z(4, 1022), r"gate.*\[4, 1024\].*\[4, 1022\]"),
    ("compress", "kv", Z(4, 1024, dtype=torch.int64), "kv.*int64.*float32"),
    ("compress", "gate", Z(3, 1024), r"gate.*\[3, 1024\].*\[4, 1024\]"),
    ("compress", "state", Z(2, 128, 2, 1024), r"state.*\[2, 128, 2, 1024\].*\[any, 8, 2, 1024\]"),
    ("compress", "state", Z(2, 8, 2, 1024, dtype=torch.bfloat16), "state.*bfloat16.*float32"),
    ("compress", "ape", Z(8, 512), r"ape.*\[8, 512\].*\[4, 1024\]"),
    ("compress", "norm_weight", Z(1024), r"norm_weight.*\[1024\].*\[512\]"),
    ("compress", "norm_weight", Z(512, device="meta"), "different devices.*meta"),
    ("compress", "gate", None, "gate.*NoneType.*tensor"),
    ("compress", "plan", plan(3), r"plan.positions.*\[3\].*\[4\]"),
    ("compress", "plan", plan(state_slots=Z(4)), "plan.state_slots.*float32.*int32"),
    ("compress", "plan", plan(cache_slots=Z(4, dtype=I32, device="meta")), "different devices.*meta"),
    ("compress", "ratio", 8, "ratio.*8.*4 and 128"),
    ("compress", "cache", index_fp8.allocate(2), "1024.*512.*index_fp8.*128"),
    ("compress", "inverse_frequencies", Z(300), "inverse_frequencies.*300.*256"),
    ("norm_rope_store", "kv", Z(3, 2, 512), r"kv.*\[3, 2, 512\].*\[any, any\]"),
    ("norm_rope_store", "kv", Z(3, 512, dtype=torch.int64), "kv.*int64.*float32"),
    ("norm_rope_store", "kv", Z(3, 576), "kv.*576.*v4.*512"),
    ("norm_rope_store", "norm_weight", Z(513), "norm_weight.*513.*512"),
    ("norm_rope_store", "positions", torch.arange(4), r"positions.*\[4\].*\[3\]"),
    ("norm_rope_store", "positions", Z(3), "positions.*float32.*int32"),
    ("norm_rope_store", "slots", torch.arange(2), r"slots.*\[2\].*\[3\]"),
    ("norm_rope_store", "slots", Z(3, dtype=torch.bool), "slots.*bool.*int32"),
    ("norm_rope_store", "slots", Z(3, dtype=I32, device="meta"), "different devices.*meta"),
    ("norm_rope_store", "inverse_frequencies", frequencies().double(), "inverse_frequencies.*float64.*float32"),
    ("norm_rope_store", "inverse_frequencies", Z(32, 2), r"inverse_frequencies.*\[32, 2\]"),
    ("norm_rope_store", "inverse_frequencies", Z(32, device="meta"), "different devices.*meta"),
    ("norm_rope_q", "q", Z(3, 512), r"q.*\[3, 512\].*\[any, any, any\]"),
    ("norm_rope_q", "q", Z(3, 2, 512, dtype=torch.int64), "q.*int64.*float32"),
    ("norm_rope_q", "positions", torch.arange(2), r"positions.*\[2\].*\[3\]"),
    ("norm_rope_q", "inverse_frequencies", Z(257), "inverse_frequencies.*257.*256"),
    ("rope_quantise_index_q", "weights", Z(3, 15), r"weights.*\[3, 15\].*\[3, 16\]"),
    ("rope_quantise_index_q", "weights", Z(3, 16, dtype=torch.bfloat16), "weights.*bfloat16.*float32"),
    ("rope_quantise_index_q", "positions", Z(3, dtype=I32, device="meta"), "different devices.*meta"),
    ("rope_quantise_index_q", "q", Z(3, 16, 96), "Hadamard.*96.*power of two"),
    ("rope_quantise_index_q", "q", Z(3, 16, 32), "inverse_frequencies.*32.*16"),
    ("mqa_logits", "q", Z(3, 16, 128), "q.*float32.*float8_e4m3fn"),
    ("mqa_logits", "q", Z(3, 16, 64).to(E4M3), r"q.*\[3, 16, 64\].*\[any, any, 128\]"),
    ("mqa_logits", "cache", v4.allocate(2, 64), "cache.*v4.*index_fp8 or exact"),
    ("mqa_logits", "cache", exact.allocate(2, 64, 128), "q.*float8_e4m3fn.*float32"),
    ("mqa_logits", "weights", Z(3, 8), r"weights.*\[3, 8\].*\[3, 16\]"),
    ("mqa_logits", "lengths", Z(3), "lengths.*float32.*int32"),
    ("mqa_logits", "lengths", Z(2, dtype=I32), r"lengths.*\[2\].*\[3\]"),
    ("mqa_logits", "page_table", Z(3, dtype=I32), r"page_table.*\[3\].*\[any, any\]"),
    ("mqa_logits", "page_table", Z(2, 2, dtype=I32), "row_to_request.*3 rows.*2 requests"),
    ("mqa_logits", "row_to_request", Z(2, dtype=I32), r"row_to_request.*\[2\].*\[3\]"),
    ("mqa_logits", "out", Z(3, 127), "out.*127.*128"),
    ("mqa_logits", "out", Z(2, 128), r"out.*\[2, 128\].*\[3, any\]"),
    ("mqa_logits", "out", Z(3, 128, dtype=torch.float64), "out.*float64.*float32"),
    ("mqa_logits", "out", Z(3, 128, device="meta"), "different devices.*meta"),
    ("mqa_logits", "lengths", Z(3, dtype=I32, device="meta"), "different devices.*meta"),
    ("mqa_logits_ragged", "keys", Z(9, 128), "keys.*float32.*float8_e4m3fn"),
    ("mqa_logits_ragged", "keys", Z(9, 64).to(E4M3), r"keys.*\[9, 64\].*\[any, 128\]"),
    ("mqa_logits_ragged", "scales", None, "scales"),
    ("mqa_logits_ragged", "scales", Z(8), r"scales.*\[8\].*\[9\]"),
    ("mqa_logits_ragged", "starts", Z(4, dtype=I32), r"starts.*\[4\].*\[3\]"),
    ("mqa_logits_ragged", "ends", Z(3), "ends.*float32.*int32"),
    ("mqa_logits_ragged", "out", Z(3, 8), r"out.*\[3, 8\].*\[3, 9\]"),
    ("topk", "logits", Z(3, 10, dtype=torch.bfloat16), "logits.*bfloat16.*float32"),
    ("topk", "logits", Z(10), r"logits.*\[10\].*\[any, any\]"),
    ("topk", "lengths", Z(4, dtype=I32), r"lengths.*\[4\].*\[3\]"),
    ("topk", "lengths", Z(3), "lengths.*float32.*int32"),
    ("topk", "k", 0, "k.*0.*at least 1"),
    ("topk", "lengths", Z(3, dtype=I32, device="meta"), "different devices.*meta"),
    ("index_topk", "k", 0, "k.*0.*at least 1"),
    ("index_topk", "page_slots", 63, "page_slots.*63.*64"),
    ("index_topk", "weights", Z(3, 16, dtype=torch.bfloat16), "weights.*bfloat16.*float32"),
    ("sparse_mla", "q", Z(3, 4, 576), "576.*v4.*512"),
    ("sparse_mla", "q", Z(3, 0, 512), "q.*at least one head"),
    ("sparse_mla", "q", Z(3, 4, 512, dtype=torch.float64), "q.*float64.*bfloat16"),
    ("sparse_mla", "cache", index_fp8.allocate(2), "512.*index_fp8.*128"),
    ("sparse_mla", "indices", Z(2, 5, dtype=I32), r"indices.*\[2, 5\].*\[3, any\]"),
    ("sparse_mla", "indices", Z(3, 5), "indices.*float32.*int32"),
    ("sparse_mla", "lengths", Z(4, dtype=I32), r"lengths.*\[4\].*\[3\]"),
    ("sparse_mla", "sink", Z(3), r"sink.*\[3\].*\[4\]"),
    ("sparse_mla", "sink", Z(4, dtype=torch.bfloat16), "sink.*bfloat16.*float32"),
    ("sparse_mla", "extra", (v4.allocate(2, 4), Z(2, 5, dtype=I32), None), r"extra indices.*\[2, 5\].*\[3, any\]"),
    ("sparse_mla", "extra", (exact.allocate(2, 4, 576), Z(3, 5, dtype=I32), None), "extra.*512.*exact.*576"),
    ("sparse_mla", "extra", (v4.allocate(2, 4), Z(3, 5, dtype=I32, device="meta"), None), "different devices.*meta"),
    ("sparse_mla", "extra", (v4.allocate(2, 4), None, None), "extra indices.*NoneType.*tensor"),
    ("sparse_mla", "lengths", Z(3, dtype=I32, device="meta"), "different devices.*meta"),
    ("kv_compact", "caches", [], "caches.*empty"),
    ("kv_compact", "caches", [v4.allocate(2, 4), v4.allocate(2, 8)], r"\(4, 2\), \(8, 2\).*one page size"),
    ("kv_compact", "caches", [Z(2, 4, 584, dtype=torch.uint8)], r"v4 cache.*\[pages, page_slots, 1, 584\]"),
    ("kv_compact", "sources", Z(2, dtype=I32), r"targets.*\[1\].*\[2\]"),
    ("kv_compact", "sources", Z(1), "sources.*float32.*int32"),
    ("kv_compact", "targets", Z(1, dtype=I32, device="meta"), "different devices.*meta"),
]


def test_every_operation_has_valid_and_wrong_arguments_here() -> None:
    public = {name for name in ops.__all__ if name not in ("explain", "CompressPlan", "mla_verify")}
    assert public == set(VALID) == {name for name, *_ in WRONG}


@pytest.mark.parametrize("name", VALID)
def test_the_valid_arguments_are_accepted(name: str) -> None:
    getattr(ops, name)(**VALID[name]())


@pytest.mark.parametrize(("name", "argument", "value", "message"), WRONG)
def test_what_does_not_fit_is_refused_with_what_was_given_and_what_is_needed(
    name: str, argument: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(**{**VALID[name](), argument: value})


def test_c4_rows_of_odd_width_have_no_two_halves() -> None:
    odd = {"kv": Z(4, 193), "gate": Z(4, 193), "state": Z(2, 8, 2, 193), "ape": Z(4, 193)}
    with pytest.raises(ValueError, match=r"kv.*193.*halves"):
        ops.compress(**{**VALID["compress"](), **odd, "norm_weight": Z(96), "cache": exact.allocate(1, 4, 96)})
