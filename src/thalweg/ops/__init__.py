"""The operations as a library: one function each, the same on the CPU (reference) and the GPU.

`explain()` says which implementation runs where, and why; `implementation=` or THALWEG_IMPLEMENTATION forces one.
"""

# Registered operations import it at their first call: better here than in the middle of somebody's first step.
import torch._dynamo  # noqa: F401

from thalweg.ops.compressor import CompressPlan, compress
from thalweg.ops.dispatch import explain
from thalweg.ops.index_topk import index_topk
from thalweg.ops.kv_compact import kv_compact
from thalweg.ops.mhc import mhc_head, mhc_post, mhc_post_pre_norm, mhc_pre
from thalweg.ops.mla_verify import mla_verify
from thalweg.ops.mqa_logits import mqa_logits, mqa_logits_ragged
from thalweg.ops.norm_rope_store import norm_rope_q, norm_rope_store, rope_quantise_index_q
from thalweg.ops.sparse_mla import sparse_mla
from thalweg.ops.topk import topk

__all__ = [
    "CompressPlan",
    "compress",
    "explain",
    "index_topk",
    "kv_compact",
    "mhc_head",
    "mhc_post",
    "mhc_post_pre_norm",
    "mhc_pre",
    "mla_verify",
    "mqa_logits",
    "mqa_logits_ragged",
    "norm_rope_q",
    "norm_rope_store",
    "rope_quantise_index_q",
    "sparse_mla",
    "topk",
]
