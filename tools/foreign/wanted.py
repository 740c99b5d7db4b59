"""A Triton kernel to compile for an architecture, as plain data: what a bundle names, a run misses, and a file lists."""

import hashlib
import importlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thalweg import ops
from thalweg.ops.variants import KernelVariant

_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "maxnreg"}


@dataclass(frozen=True)
class Wanted:
    """One configuration of one kernel (`KernelVariant`) for one architecture, under one set of assumptions.

    `assumed` names the parameters that the code may take to be divisible by 16: those the variant declares, or fewer.
    """

    architecture: str  # "sm_80"
    name: str  # the variant's
    module: str  # of the kernel
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    assumed: tuple[str, ...]

    @property
    def configuration(self) -> str:
        """Names everything but the assumptions. Two variants of one name that differ in anything differ in this."""
        content = {key: value for key, value in asdict(self).items() if key not in ("name", "assumed")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def variant(self) -> KernelVariant:
        """What the compile suite compiles. Raises AttributeError where the kernel is not there any more, ValueError for options
        that only this GPU's own launches could honour."""
        if unknown := set(self.options) - _OPTIONS:
            raise ValueError(f"{self.name}: compiled with {', '.join(sorted(unknown))}, which is not carried")
        return KernelVariant(
            name=self.name,
            kernel=getattr(importlib.import_module(self.module), self.kernel),
            signature=self.signature,
            constexprs=self.constexprs,
            divisible_by_16=self.assumed,
            num_warps=self.options["num_warps"],
            num_stages=self.options["num_stages"],
            max_registers=self.options.get("maxnreg"),
        )


def wanted(variant: KernelVariant, architecture: str, assumed: Iterable[str]) -> Wanted:
    """`variant` on `architecture`, where the parameters `assumed` are divisible by 16."""
    return Wanted(
        architecture=architecture,
        name=variant.name,
        module=variant.kernel.fn.__module__,
        kernel=variant.kernel.fn.__name__,
        signature=dict(variant.signature),
        constexprs=dict(variant.constexprs),
        options=variant.options(),
        assumed=tuple(name for name in variant.divisible_by_16 if name in set(assumed)),
    )


def from_json(record: dict[str, Any]) -> Wanted:
    """The inverse of `dataclasses.asdict`: JSON has lists where kernels take tuples."""
    constexprs = {name: tuple(each) if isinstance(each, list) else each for name, each in record["constexprs"].items()}
    return Wanted(**{**record, "constexprs": constexprs, "assumed": tuple(record["assumed"])})


def sources() -> str:
    """A digest of every file that holds kernels: code of a bundle stands for these sources and no others."""
    digest = hashlib.sha256()
    for file in sorted(Path(ops.__path__[0]).rglob("*.py")):
        text = file.read_bytes()
        if b"@triton.jit" in text:
            digest.update(file.name.encode() + b"\0" + text)
    return digest.hexdigest()[:16]
