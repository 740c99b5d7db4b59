"""A checkpoint folder as tensors under canonical names, dequantised, each checked before any is read."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thalweg.errors import UserError
from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.config_mla import MlaConfig
from thalweg.models.weights import quantization
from thalweg.models.weights.expected import Expected, Kind, expected_tensors
from thalweg.models.weights.headers import ITEM_BYTES, read_headers
from thalweg.models.weights.memory import check_memory
from thalweg.models.weights.names import Piece, Recipe, Role, assign, check_shape

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,  # ue8m0 stays a byte: decoded by table
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_PLAIN = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")
_PACKED = ("I8", "U8")
_DEFAULT_BLOCK = (128, 128)

Read = Callable[[Role], Tensor]


def load_weights(
    path: str | Path,
    config: DeepseekV4Config | MlaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    mtp: bool = False,
) -> dict[str, Tensor]:
    """Every tensor of expected_tensors(config, mtp=mtp), in that order.

    dtype: float32, float64 or bfloat16 for matrices, embedding and head; norms, hyper-connections, sinks, compressor
    biases (`ape`) and router biases are float32 always, `tid2eid` int64. Weights stored as fp8, MXFP4 or NVFP4 are
    dequantised. mtp: DeepSeek-V4's MTP blocks too; without it they are skipped where the checkpoint has them.

    Raises UserError, one line, before any weight is read: missing, truncated or corrupt files, tensors missing or
    unknown to `config`, shapes or formats that do not fit it, too little memory on `device`. While reading: a weight that
    is NaN or infinite.
    """
    if dtype not in DTYPES:
        raise UserError(f"weights as {dtype}: possible are {', '.join(str(d) for d in DTYPES)}")
    if mtp and not (isinstance(config, DeepseekV4Config) and config.num_mtp_layers):
        raise UserError(f"{path}: this config.json has no MTP block that can be loaded")
    device = torch.device(device)
    recipes = assign(read_headers(path), config, path, mtp=mtp)
    expected = expected_tensors(config, mtp=mtp)
    block = (config.quantization.weight_block_size if config.quantization else None) or _DEFAULT_BLOCK
    decoders = {name: _decoder(name, recipe, expected[name], block) for name, recipe in recipes.items()}
    check_memory(path, expected, dtype, device)
    held = {Kind.COMPUTE: dtype, Kind.FLOAT32: torch.float32, Kind.INTEGER: torch.int64}
    weights = {}
    for name, recipe in recipes.items():
        values = decoders[name](partial(_read_role, recipe, device))
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise UserError(f"{path}: {name} holds numbers that are NaN or infinite: the checkpoint is damaged")
        weights[name] = values.to(held[expected[name].kind])
    return weights


def _decoder(name: str, recipe: Recipe, expected: Expected, block: tuple[int, int]) -> Callable[[Read], Tensor]:
    """The way from stored pieces to values; every dtype and shape is checked here, where nothing is read yet."""
    weight, scale = recipe.pieces[Role.WEIGHT], recipe.pieces.get(Role.SCALE)
    stored, shape = weight.header.dtype, weight.shape
    if expected.kind is Kind.INTEGER and stored in _INTEGERS:
        check_shape(name, expected, shape, weight)
        return lambda read: read(Role.WEIGHT)
    if stored in _PLAIN and scale is None:
        check_shape(name, expected, shape, weight)
        return lambda read: read(Role.WEIGHT)
    if stored == "F8_E4M3" and scale is not None and len(expected.shape) == 2:
        check_shape(name, expected, shape, weight)
        blocks = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
        _check_scale(scale, blocks, ("F32", "BF16", "F8_E8M0"))
        return lambda read: quantization.dequantize_fp8(read(Role.WEIGHT), read(Role.SCALE), block)
    if stored in _PACKED and scale is not None and len(expected.shape) == 2:
        check_shape(name, expected, (*shape[:-1], 2 * shape[-1]), weight)
        return _fp4_decoder(recipe, scale, expected.shape)
    scales = f"scales of {scale.header.dtype}" if scale else "no scales"
    raise UserError(
        f"{weight.header.file}: {weight.header.name} is stored as {stored} with {scales}; possible are "
        "F32, F16, BF16, fp8 e4m3 by blocks, MXFP4 and NVFP4"
    )


def _fp4_decoder(recipe: Recipe, scale: Piece, shape: tuple[int, ...]) -> Callable[[Read], Tensor]:
    rows, columns = shape
    if scale.header.dtype in ("F8_E8M0", "U8"):
        _check_scale(scale, (rows, columns // quantization.MXFP4_BLOCK), ("F8_E8M0", "U8"))
        return lambda read: quantization.dequantize_mxfp4(read(Role.WEIGHT), read(Role.SCALE))
    _check_scale(scale, (rows, columns // quantization.NVFP4_BLOCK), ("F8_E4M3",))
    for role in (Role.GLOBAL_SCALE, Role.GLOBAL_DIVISOR):
        piece = recipe.pieces.get(role)
        if piece is not None and math.prod(piece.shape) == 1 and piece.header.dtype == "F32":
            divide = role is Role.GLOBAL_DIVISOR
            return lambda read: quantization.dequantize_nvfp4(
                read(Role.WEIGHT), read(Role.SCALE), read(role), divide=divide
            )
    raise UserError(
        f"{scale.header.file}: {scale.header.name} is an NVFP4 scale without one float32 weight_scale_2 "
        "(ModelOpt) or weight_global_scale (compressed-tensors) beside it"
    )


def _check_scale(scale: Piece, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if scale.shape != shape or scale.header.dtype not in dtypes:
        raise UserError(
            f"{scale.header.file}: {scale.header.name} is {scale.header.dtype} {list(scale.shape)}; "
            f"its weight asks for {' or '.join(dtypes)} {list(shape)}"
        )


def _read_role(recipe: Recipe, device: torch.device, role: Role) -> Tensor:
    return _read(recipe.pieces[role], device)


def _read(piece: Piece, device: torch.device) -> Tensor:
    """The bytes of one piece, and no others, as a tensor of their own on `device`."""
    header, count = piece.header, math.prod(piece.shape)
    item = ITEM_BYTES[header.dtype]
    buffer = bytearray(count * item)
    with header.file.open("rb") as stream:
        stream.seek(header.offset + piece.start * item)
        if stream.readinto(buffer) != len(buffer):
            raise UserError(f"{header.file}: became shorter while it was read")
    if not count:
        return torch.empty(piece.shape, dtype=_TORCH_DTYPES[header.dtype], device=device)
    return torch.frombuffer(buffer, dtype=_TORCH_DTYPES[header.dtype]).reshape(piece.shape).to(device)
