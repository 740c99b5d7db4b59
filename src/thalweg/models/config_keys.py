"""Reading typed values out of a checkpoint's `config.json`, with one-line errors. No torch, no numpy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.errors import UserError

LARGEST = 2**31 - 1
"""Of every integer: far beyond any model, and products of several stay exact in what the operations take."""
MOST_EXPERTS = 2**20
"""Over all layers of a model."""
_LEAST, _MOST = 1e-37, 3e38  # what float32 holds, where values are used


class Keys:
    """A JSON object in which one field may stand under several keys, because several programs write such files.

    `aliases` maps a field to the keys it may stand under, the preferred one first; a field it does not list stands
    under its own name. A key whose value is null counts as absent.
    """

    def __init__(self, values: dict[str, Any], source: Path, aliases: dict[str, tuple[str, ...]]) -> None:
        self.values = values
        self.source = source
        self.aliases = aliases

    def names(self, field: str) -> tuple[str, ...]:
        return self.aliases.get(field, (field,))

    def has(self, field: str) -> bool:
        return any(self.values.get(name) is not None for name in self.names(field))

    def get(self, field: str, default: Any = None) -> Any:
        for name in self.names(field):
            if self.values.get(name) is not None:
                return self.values[name]
        return default

    def require(self, fields: tuple[str, ...]) -> None:
        """Raises UserError that lists every one of `fields` that is absent."""
        missing = [" or ".join(self.names(field)) for field in fields if not self.has(field)]
        if missing:
            raise UserError(f"{self.source}: missing {', '.join(missing)}")

    def integer(self, field: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            raise self.error(field, value, f"an integer of at least {minimum} and at most {LARGEST}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
            raise self.error(field, value, "a number above 0 that float32 holds")
        return float(value)

    def check_experts(self, field: str, num_experts: int, num_layers: int) -> None:
        """Refuses counts that no checkpoint has, before anybody makes a list as long as they say."""
        most = MOST_EXPERTS // num_layers
        if num_experts > most:
            raise self.error(field, num_experts, f"at most {most} in each of {num_layers} layers")

    def rope_base(self, field: str) -> float:
        """A base of rotary frequencies: base 1 would turn every dimension alike, and YaRN divides by its logarithm."""
        value = self.number(field)
        if value <= 1:
            raise self.error(field, value, "a number above 1")
        return value

    def boolean(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, value, "true or false")
        return value

    def choice(self, field: str, default: str, possible: tuple[str, ...]) -> str:
        value = self.get(field, default)
        if value not in possible:
            raise self.error(field, value, " or ".join(possible))
        return value

    def sequence(self, field: str, possible: tuple[Any, ...]) -> list[Any]:
        """A list of which every element is one of `possible`."""
        value = self.get(field)
        if not isinstance(value, list):
            raise self.error(field, value, "a list")
        for element in value:
            # 0 is not False and 4.0 not 4 here, and a list among the elements has no hash.
            if not any(type(element) is type(one) and element == one for one in possible):
                raise self.error(
                    field, element, f"{', '.join(map(str, possible[:-1]))} or {possible[-1]} for each layer"
                )
        return value

    def table(self, field: str) -> dict[str, Any]:
        """The JSON object under `field`; empty where the field is absent."""
        value = self.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, value, "an object")
        return value

    def token_ids(self, field: str) -> tuple[int, ...]:
        """Zero or more token ids: absent, one integer, or a list of integers."""
        value = self.get(field, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.error(field, value, "a token id or a list of token ids")
        return tuple(ids)

    def token_id(self, field: str) -> int | None:
        ids = self.token_ids(field)
        if len(ids) > 1:
            raise self.error(field, list(ids), "one token id")
        return ids[0] if ids else None

    def error(self, field: str, value: object, possible: str) -> UserError:
        name = next((name for name in self.names(field) if name in self.values), self.names(field)[0])
        return UserError(f"{self.source}: {name} is {value!r}; possible is {possible}")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): RoPE frequencies stretched by `factor` beyond `original_max_position_embeddings`.

    `mscale`, `mscale_all_dim` and `attention_factor` are the magnitude scaling of the MLA family, None where the file
    names none; DeepSeek-V4 has no magnitude scaling.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


def read_yarn(table: dict[str, Any], source: Path) -> YarnScaling | None:
    """A `rope_scaling` or `rope_parameters` object as YarnScaling; None where it asks for plain RoPE."""
    keys = Keys(table, source, {"kind": ("rope_type", "type")})
    if keys.choice("kind", "default", ("default", "yarn")) == "default":
        return None
    keys.require(("factor", "original_max_position_embeddings"))
    return YarnScaling(
        factor=keys.number("factor"),
        original_max_position_embeddings=keys.integer("original_max_position_embeddings"),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        mscale=keys.number("mscale") if keys.get("mscale") else None,
        mscale_all_dim=keys.number("mscale_all_dim") if keys.get("mscale_all_dim") else None,
        attention_factor=keys.number("attention_factor") if keys.has("attention_factor") else None,
    )


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of its own weights: a statement for planning; the loader believes the tensors' dtypes.

    method: `fp8`, `modelopt`, `compressed-tensors`, ... as written. format: `NVFP4`, `nvfp4-pack-quantized`, ...
    weight_block_size: rows and columns under one fp8 scale. expert_dtype: `fp4` or `fp8` for routed experts that
    differ from the rest.
    """

    method: str
    format: str | None = None
    weight_block_size: tuple[int, int] | None = None
    expert_dtype: str | None = None


def read_quantization(keys: Keys) -> Quantization | None:
    """The `quantization_config` object (or DeepSeek's own top-level `dtype`: `fp8`); None for plain weights."""
    inner = Keys(keys.table("quantization_config"), keys.source, {"format": ("quant_algo", "format", "fmt")})
    if not inner.values and keys.get("dtype") != "fp8":
        return None
    block = inner.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block)
    ):
        raise inner.error("weight_block_size", block, "two integers above 0")
    return Quantization(
        method=str(inner.get("quant_method", "fp8")),
        format=inner.get("format"),
        weight_block_size=(block[0], block[1]) if block else None,
        expert_dtype=keys.get("expert_dtype", inner.get("expert_dtype")),
    )
