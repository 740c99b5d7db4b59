"""A checkpoint folder's `config.json` as one frozen dataclass per architecture. No torch, no numpy: `plan` reads it."""

import json
from pathlib import Path
from typing import Any

from thalweg.errors import UserError
from thalweg.models import config_deepseek_v4, config_mla
from thalweg.models.config_deepseek_v4 import DeepseekV4Config
from thalweg.models.config_keys import Keys, Quantization, YarnScaling
from thalweg.models.config_mla import MlaConfig

__all__ = ["DeepseekV4Config", "MlaConfig", "Quantization", "YarnScaling", "parse_config", "read_config"]

ARCHITECTURES = ("deepseek_v4", "deepseek_v3", "kimi_k2", "kimi_k25")
_MODEL_TYPE_OF_CLASS = {"DeepseekV4ForCausalLM": "deepseek_v4", "DeepseekV3ForCausalLM": "deepseek_v3"}


def read_config(path: str | Path) -> DeepseekV4Config | MlaConfig:
    """The configuration of the checkpoint folder `path`.

    Raises UserError, one line, where the file is missing or no JSON object, where the architecture is none that the
    project serves, and where keys are missing or contradict each other.
    """
    source = Path(path) / "config.json"
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such folder; give the folder of a checkpoint, with config.json and *.safetensors")
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no config.json; give the folder of a checkpoint") from None
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON: {error}") from None
    return parse_config(values, source)


def parse_config(values: Any, source: Path) -> DeepseekV4Config | MlaConfig:
    """`values`: what the JSON file `source` holds; `source` is named in errors only."""
    if not isinstance(values, dict):
        raise UserError(f"{source}: not a JSON object but {type(values).__name__}")
    model_type = _model_type(values)
    if model_type == "deepseek_v4":
        return config_deepseek_v4.read_deepseek_v4(Keys(values, source, config_deepseek_v4.ALIASES))
    if model_type == "kimi_k25":
        values, model_type = _text_config(values, source), "kimi_k2"
    if model_type in ("deepseek_v3", "kimi_k2"):
        return config_mla.read_mla(Keys(values, source, config_mla.ALIASES))
    if model_type == "deepseek_v32":
        raise UserError(
            f"{source}: deepseek_v32 has operations and the SGLang plug-in here, no embedded model; "
            f"possible are {', '.join(ARCHITECTURES)}"
        )
    raise UserError(f"{source}: unknown architecture {model_type!r}; possible are {', '.join(ARCHITECTURES)}")


def _model_type(values: dict[str, Any]) -> str | None:
    if isinstance(values.get("model_type"), str):
        return values["model_type"]
    names = values.get("architectures")
    if isinstance(names, list) and names:
        return _MODEL_TYPE_OF_CLASS.get(names[0], names[0])
    # The file beside DeepSeek's inference code names no architecture; these keys together are V4's alone.
    return "deepseek_v4" if {"dim", "n_layers", "compress_ratios"} <= values.keys() else None


def _text_config(values: dict[str, Any], source: Path) -> dict[str, Any]:
    """The language model inside a vision-language wrapper; quantisation may stand outside of it."""
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        raise UserError(f"{source}: missing text_config")
    if inner.get("model_type", "deepseek_v3") not in ("deepseek_v3", "kimi_k2"):
        raise UserError(f"{source}: text_config is {inner['model_type']!r}; possible are deepseek_v3, kimi_k2")
    return {"quantization_config": values.get("quantization_config"), **inner}
