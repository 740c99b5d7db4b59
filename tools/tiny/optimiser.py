"""Muon for the matrices inside the blocks, Adam for everything else.

Muon: the momentum of a matrix is brought near an orthogonal matrix by five Newton-Schulz steps before it is applied
(Keller Jordan's optimiser, 2024). Matrices of one shape go through it together.
"""

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
MUON_DECAY = 0.01  # times the learning rate, per step
ADAM_BETAS = (0.9, 0.98)
# Peak learning rates of the parameters that Adam moves, by the last part of their name; the rest: "other".
ADAM_RATES = {"embed": 4e-3, "head": 2e-3, "gate": 1e-3, "weights_proj": 1e-3, "fn": 5e-4, "other": 3e-3}


def is_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of a block that Muon moves."""
    others = ("embed.", "head.", "hc_", "ffn.gate.", "weights_proj", ".ape")
    return parameter.dim() == 2 and not any(part in name for part in others)


def adam_rate(name: str) -> float:
    """The peak learning rate of a parameter that Adam moves."""
    if name.startswith(("embed.", "head.")):
        return ADAM_RATES[name.split(".")[0]]
    if name.endswith("ffn.gate.weight"):
        return ADAM_RATES["gate"]
    if "weights_proj" in name:
        return ADAM_RATES["weights_proj"]
    return ADAM_RATES["fn"] if name.endswith("_fn") else ADAM_RATES["other"]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Roughly U V^T for each U S V^T of [n, a, b], by five quintic Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x.to(torch.bfloat16) if x.is_cuda else x.float()
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.transpose(1, 2) if tall else x


class Optimiser:
    """Both optimisers behind one step; learning rates are peak rates times `factor`."""

    def __init__(self, model: nn.Module, muon_rate: float) -> None:
        named = dict(model.named_parameters())
        self.muon_rate = muon_rate
        self.muon_groups: dict[tuple[int, ...], list[str]] = {}
        for name, parameter in named.items():
            if is_muon(name, parameter):
                self.muon_groups.setdefault(tuple(parameter.shape), []).append(name)
        self.parameters = named
        self.momenta = {
            shape: torch.zeros(len(names), *shape, device=named[names[0]].device)
            for shape, names in self.muon_groups.items()
        }
        self.adam_names = [name for name, parameter in named.items() if not is_muon(name, parameter)]
        by_rate: dict[float, list[str]] = {}
        for name in self.adam_names:
            by_rate.setdefault(adam_rate(name), []).append(name)
        groups = [{"params": [named[n] for n in names], "peak": rate, "lr": rate} for rate, names in by_rate.items()]
        self.adam = torch.optim.Adam(groups, betas=ADAM_BETAS, fused=named[self.adam_names[0]].is_cuda)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Applies the gradients and clears them."""
        rate = self.muon_rate * factor
        for shape, names in self.muon_groups.items():
            parameters = [self.parameters[name] for name in names]
            gradients = torch.stack([parameter.grad for parameter in parameters])
            momentum = self.momenta[shape].mul_(MOMENTUM).add_(gradients, alpha=1 - MOMENTUM)
            update = orthogonalise(gradients.lerp(momentum, MOMENTUM)).float()
            torch._foreach_mul_(parameters, 1 - rate * MUON_DECAY)
            torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.adam.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments by name, bfloat16: "momentum.NAME", "adam1.NAME", "adam2.NAME"; and "adam_steps"."""
        out = {}
        for shape, names in self.muon_groups.items():
            for row, name in zip(self.momenta[shape], names, strict=True):
                out[f"momentum.{name}"] = row.to(torch.bfloat16)
        steps = torch.zeros(())
        for name in self.adam_names:
            moments = self.adam.state.get(self.parameters[name])
            if moments:
                out[f"adam1.{name}"] = moments["exp_avg"].to(torch.bfloat16)
                out[f"adam2.{name}"] = moments["exp_avg_sq"].to(torch.bfloat16)
                steps = moments["step"].detach().float().cpu()
        out["adam_steps"] = steps.reshape(1)
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        for shape, names in self.muon_groups.items():
            for row, name in enumerate(names):
                self.momenta[shape][row].copy_(state[f"momentum.{name}"])
        for name in self.adam_names:
            parameter = self.parameters[name]
            step = state["adam_steps"][0].clone()
            self.adam.state[parameter] = {
                "step": step.to(parameter.device) if parameter.is_cuda else step,
                "exp_avg": state[f"adam1.{name}"].to(parameter.device, torch.float32),
                "exp_avg_sq": state[f"adam2.{name}"].to(parameter.device, torch.float32),
            }
