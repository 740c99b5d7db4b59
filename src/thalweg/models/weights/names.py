"""From the names a checkpoint uses to canonical names: which stored tensor, or which part of one, is what. No torch.

DeepSeek-V4 comes in three namings: DeepSeek's own (canonical), transformers' modules (`self_attn.q_a_proj`, experts
fused in one tensor), and what transformers' save_pretrained writes (DeepSeek's words below `model.`, with
`attn.norm` for kv_norm). The MLA family: the released names (canonical), and transformers' modules.
"""

import math
import re
from dataclasses import dataclass, field
from enum import Enum

from thalweg.errors import UserError
from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.config_mla import MlaConfig
from thalweg.models.weights.expected import Expected, expected_tensors
from thalweg.models.weights.headers import TensorHeader


class Role(Enum):
    WEIGHT = "weight"
    SCALE = "scale"  # one for each block of the weight
    GLOBAL_SCALE = "global scale"  # NVFP4 by ModelOpt: multiplies
    GLOBAL_DIVISOR = "global divisor"  # NVFP4 by compressed-tensors: divides


@dataclass(frozen=True)
class Piece:
    """A run of elements, from element `start` on, of one stored tensor, to be read as `shape`."""

    header: TensorHeader
    start: int
    shape: tuple[int, ...]


@dataclass
class Recipe:
    """What one canonical tensor is made of."""

    pieces: dict[Role, Piece] = field(default_factory=dict)


_ROLE_SUFFIXES = (
    (".weight_scale_inv", Role.SCALE),
    (".weight_scale_2", Role.GLOBAL_SCALE),
    (".weight_global_scale", Role.GLOBAL_DIVISOR),
    (".weight_scale", Role.SCALE),
    (".weight_packed", Role.WEIGHT),
    (".scale", Role.SCALE),
)
# Scales of activations and of the KV cache (ModelOpt, compressed-tensors): nothing here quantises by them.
_ACTIVATION_SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
# Functions of the configuration that some exporters write all the same.
_DERIVED = (".rotary_emb.inv_freq", ".weight_shape")

_V4_TOP = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_V4_BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn.norm.weight": "attn.kv_norm.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "self_attn.compressor.indexer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    **{f"{site}_hc.{part}": f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
}
_V4_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# The MTP block reads the model's embedding and head; releases store copies of them.
_V4_MTP_COPY = re.compile(r"mtp\.\d+\.(emb\.tok_emb|embed|head)\.weight")
_V4_MTP = re.compile(r"mtp\.\d+\.")
_BLOCK = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")
_FUSED = re.compile(r"(?:model\.)?(layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_MLA_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "model.vision_tower.", "model.mm_projector.")


def assign(
    headers: dict[str, TensorHeader], config: DeepseekV4Config | MlaConfig, source: object, *, mtp: bool
) -> dict[str, Recipe]:
    """Canonical name -> the stored pieces it is made of, for exactly expected_tensors(config, mtp=mtp).

    Skipped by rule: scales of activations, copies of embedding and head in MTP blocks, MTP blocks unless `mtp`, the
    layers past the last one that V3 keeps its MTP block in, and vision towers. Anything else that the configuration
    does not know, anything missing and anything stored twice is a UserError that names `source`.
    """
    expected = expected_tensors(config, mtp=mtp)
    recipes: dict[str, Recipe] = {}
    unknown: list[str] = []
    for name, header in headers.items():
        if name.endswith(_ACTIVATION_SCALES + _DERIVED):
            continue
        base, role = _role(name)
        canonical = _v4_name(base) if isinstance(config, DeepseekV4Config) else _mla_name(base)
        if _skipped(canonical, config, mtp):
            continue
        for target, piece in _targets(canonical, header, config):
            if target not in expected:
                unknown.append(name)
                break
            if role in recipes.setdefault(target, Recipe()).pieces:
                raise UserError(f"{source}: {target} is stored twice, once as {name}")
            recipes[target].pieces[role] = piece
    if unknown:
        raise UserError(f"{source}: {len(unknown)} tensors do not belong to this config.json{_few(unknown)}")
    missing = [name for name in expected if name not in recipes or Role.WEIGHT not in recipes[name].pieces]
    if missing:
        raise UserError(f"{source}: {len(missing)} of {len(expected)} tensors are missing{_few(missing)}")
    return {name: recipes[name] for name in expected}


def has_mtp(headers: dict[str, TensorHeader]) -> bool:
    """Whether a DeepSeek-V4 checkpoint stores MTP blocks (transformers' does not, whatever its config.json says)."""
    return any(_V4_MTP.match(name.removeprefix("model.")) for name in headers)


def _role(name: str) -> tuple[str, Role]:
    """The name of the weight that a stored tensor belongs to, and what it is to that weight."""
    for suffix, role in _ROLE_SUFFIXES:
        stem = name.removesuffix(suffix)
        if stem != name and not stem.endswith("_hc"):  # attn_hc.scale is a parameter, not a quantisation scale
            return f"{stem}.weight", role
    return name, Role.WEIGHT


def _v4_name(name: str) -> str:
    name = name.removeprefix("model.")
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _V4_TOP.get(name, name)
    prefix, tail = block.groups()
    expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", tail)
    if expert:
        tail = f"ffn.experts.{expert[1]}.{_V4_EXPERT[expert[2] + '_proj']}.weight"
    return prefix + _V4_BLOCK.get(tail, tail)


def _mla_name(name: str) -> str:
    # Kimi's vision-language files put the language model below one more prefix.
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _skipped(canonical: str, config: DeepseekV4Config | MlaConfig, mtp: bool) -> bool:
    if isinstance(config, DeepseekV4Config):
        if _V4_MTP_COPY.fullmatch(canonical):
            return True
        return not mtp and _V4_MTP.match(canonical) is not None
    layer = _MLA_LAYER.match(canonical)
    if layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_mtp_layers:
        return True
    return canonical.startswith(_VISION)


def _targets(canonical: str, header: TensorHeader, config: DeepseekV4Config | MlaConfig) -> list[tuple[str, Piece]]:
    """The canonical tensors inside one stored tensor: itself, or every expert of a fused one [experts, out, in]."""
    fused = _FUSED.fullmatch(canonical)
    if fused is None:
        return [(canonical, Piece(header, 0, header.shape))]
    v4 = isinstance(config, DeepseekV4Config)
    names = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    if len(header.shape) != 3 or header.shape[1] % len(names):
        raise UserError(f"{header.file}: {header.name} is {list(header.shape)}, not [experts, outputs, inputs]")
    experts, outputs, inputs = header.shape
    shape = (outputs // len(names), inputs)
    targets = []
    for expert in range(experts):
        for position, name in enumerate(names):
            target = (
                f"{fused[1]}ffn.experts.{expert}.{_V4_EXPERT[name]}.weight"
                if v4
                else f"model.{fused[1]}mlp.experts.{expert}.{name}.weight"
            )
            start = (expert * len(names) + position) * math.prod(shape)
            targets.append((target, Piece(header, start, shape)))
    return targets


def _few(names: list[str]) -> str:
    return ", for example " + ", ".join(names[:3])


def check_shape(name: str, expected: Expected, stored: tuple[int, ...], piece: Piece) -> None:
    """`stored`: the shape after unpacking. UserError where the configuration asks for another."""
    if stored != expected.shape:
        raise UserError(
            f"{piece.header.file}: {piece.header.name} ({name}) is {list(stored)}; "
            f"config.json asks for {list(expected.shape)}"
        )
