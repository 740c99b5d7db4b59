"""The Triton kernel of the trainer gives the values and gradients of the plain Sinkhorn loop."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from tools.tiny import dense_parts, sinkhorn_kernel

torch.manual_seed(0)
logits = (3 * torch.randn(130, 4, 4)).requires_grad_()
weights = torch.randn(130, 4, 4)
exact = logits.detach().double().requires_grad_()
results = []
for function, x in ((sinkhorn_kernel.sinkhorn, logits), (dense_parts.sinkhorn, exact)):
    y = function(x, 20, 1e-6)
    results.append((y.detach(), torch.autograd.grad(y, x, weights.to(y.dtype))[0]))
for ours, reference in zip(*results):
    assert (ours - reference).abs().max() < 2e-6, (ours - reference).abs().max()
"""


# Elsewhere the package does not depend on triton, because there is none. On Linux a missing triton is a failure, no skip.
@pytest.mark.skipif(platform.system() != "Linux", reason="there is no triton for this system")
def test_the_kernel_agrees_with_the_plain_loop_in_float64():
    # Interpreting is chosen when triton is imported: a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
