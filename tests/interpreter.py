"""Triton's CPU interpreter, mended for the tests: what it computes wrong is computed right, or refused.

Wrong in every version from 3.6 to 3.9: products of bfloat16 (it multiplies the codes), conversions to bfloat16 (truncates) and to
e4m3 (loses carries and subnormals), the NaN of e4m3 (decoded to 480), integers to bfloat16, and all bfloat16 arithmetic.
The conversions go through torch here; arithmetic on bfloat16 and fp8 raises: kernels convert to float32 after the load.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

E4M3_MAX = 448.0


def interpret() -> None:
    """Makes every kernel that is defined from now on an interpreted one. Before the first import of triton."""
    assert "triton" not in sys.modules, "triton was imported before the interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"
    _mend_numbers()
    _mend_range()


def _mend_numbers() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    known = {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    stored_as_codes = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # numpy has no such types: the arrays hold integers
    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    theirs = {
        name: getattr(builder, name) for name in ("cast_impl", "create_dot", "binary_op", "unary_op", "ternary_op")
    }
    convert_theirs = interpreter._convert_float

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source not in known or target not in known or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return convert_theirs(data, source, target, rounding)
        values = torch.from_numpy(np.array(data)).view(
            known[source]
        )  # a copy, as torch wants it: writable and contiguous
        if target == tl.float8e4nv:
            values = values.double().clamp(-E4M3_MAX, E4M3_MAX).to(values.dtype)  # the hardware saturates
        codes = values.to(known[target]).view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy()
        return codes.view(f"uint{target.primitive_bitwidth}").reshape(np.shape(data))

    def cast_impl(self, source, target):
        if target.scalar == tl.bfloat16 and not source.dtype.scalar.is_floating():
            return self.cast_impl(theirs["cast_impl"](self, source, tl.float32), target)
        return theirs["cast_impl"](self, source, target)

    def factor(operand: handle) -> np.ndarray:
        """A product's operand in float32, exactly."""
        kind = operand.dtype.scalar
        return convert(operand.data, kind, tl.float32, None).view(np.float32) if kind in known else operand.data

    def create_dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
        if not a.dtype.scalar.is_floating() or a.dtype.scalar == tl.float64:
            return theirs["create_dot"](self, a, b, accumulator, input_precision, max_num_imprecise_acc)
        product = np.matmul(factor(a), factor(b), dtype=np.float32)
        return handle((product + accumulator.data).astype(accumulator.data.dtype), accumulator.dtype.scalar)

    def refusing(name: str):
        def operation(self, *arguments):
            for argument in arguments if np.where not in arguments else ():  # a choice computes nothing
                if isinstance(argument, handle) and argument.dtype.scalar in stored_as_codes:
                    raise TypeError(
                        f"the interpreter has no {argument.dtype.scalar} arithmetic: convert to float32 first"
                    )
            return theirs[name](self, *arguments)

        return operation

    interpreter._convert_float = convert
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, refusing(name))


def _mend_range() -> None:
    """triton 3.6 with numpy 2.4 or newer: a loop's bound is an array of one element, which is no integer to numpy any more."""
    from triton.runtime import interpreter

    patch_theirs = interpreter._patch_lang_tensor

    def patch(tensor, *scope):
        patch_theirs(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch


@dataclass
class Accesses:
    """Where interpreted kernels read and wrote, as (addresses, bytes at each) of every load and store, masks applied."""

    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def outside(self, *tensors: torch.Tensor) -> int:
        """How many accesses touch a byte that is in none of the tensors."""
        count = 0
        for addresses, size in (*self.loads, *self.stores):
            inside = np.zeros(addresses.shape, dtype=bool)
            for tensor in tensors:
                extent = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                end = tensor.data_ptr() + extent * tensor.element_size()
                inside |= (addresses >= tensor.data_ptr()) & (addresses + size <= end) & (tensor.numel() > 0)
            count += int((~inside).sum())
        return count

    def stored_twice(self, tensor: torch.Tensor) -> int:
        """How many elements of a contiguous tensor are stored more than once: programs run in any order on a GPU."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        stored = np.concatenate([addresses for addresses, _ in self.stores])
        stored = stored[(stored >= begin) & (stored < end)]
        return len(stored) - len(np.unique(stored))


@contextmanager
def watching() -> Iterator[Accesses]:
    """Records what interpreted kernels access."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    accesses, load, store = Accesses(), Builder.create_masked_load, Builder.create_masked_store

    def record(of: list[tuple[np.ndarray, int]], pointers, mask) -> None:
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        of.append((addresses.astype(np.uint64), pointers.get_element_ty().primitive_bitwidth // 8))

    def watched_load(self, pointers, mask, *rest):
        record(accesses.loads, pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        record(accesses.stores, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    Builder.create_masked_load, Builder.create_masked_store = watched_load, watched_store
    try:
        yield accesses
    finally:
        Builder.create_masked_load, Builder.create_masked_store = load, store
