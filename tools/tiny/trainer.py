"""The training loop of the tiny checkpoint."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.checkpoint import load_state, save_model, save_state
from tools.tiny.dense_attention import Mode
from tools.tiny.dense_model import DenseModel
from tools.tiny.dense_parts import Fusible
from tools.tiny.evaluation import bits_per_byte
from tools.tiny.initialise import initialise
from tools.tiny.optimiser import Optimiser
from tools.tiny.schedule import BALANCE_RATE, MTP_WEIGHT, Schedule
from tools.tiny.tiny_config import TinyConfig
from tools.tiny.training_data import TokenStream

LN2 = math.log(2)


@dataclass(frozen=True)
class Settings:
    """Choices of a run; written beside its log."""

    total_steps: int
    batch_tokens: int
    seed: int
    muon_rate: float
    log_every: int = 20
    evaluate_every: int = 400
    save_every_seconds: float = 150.0
    evaluation_windows: int = 32
    evaluation_window: int = 4096


class Trainer:
    """Model, optimiser and data of one run; `run` goes on from the step it stands at."""

    def __init__(
        self,
        config: dict,
        settings: Settings,
        schedule: Schedule,
        train: TokenStream,
        heldout: TokenStream,
        device: torch.device,
    ) -> None:
        self.config, self.settings, self.schedule = config, settings, schedule
        self.train, self.heldout, self.device = train, heldout, device
        self.model = DenseModel(TinyConfig.from_dict(config))
        initialise(self.model, settings.seed)
        self.model.to(device)
        self.optimiser = Optimiser(self.model, settings.muon_rate)
        index = [p for name, p in self.model.named_parameters() if ".indexer." in name]
        known = {id(p) for p in index}
        # Clipped apart: the indexer's loss reaches the indexer alone and must not shrink the other gradients.
        self.clip_groups = [[p for p in self.model.parameters() if id(p) not in known], index]
        self.step = 0
        self.seconds = 0.0  # spent training, earlier runs included

    def resume(self, folder: Path) -> None:
        """Goes on from a saved state of the same settings."""
        progress = load_state(self.model, self.optimiser, folder)
        settings = json.loads(json.dumps(asdict(self.settings)))  # as the file has them: lists for tuples
        if progress["settings"] != settings:
            raise ValueError(f"the saved run has other settings: {progress['settings']}, not {settings}")
        self.step, self.seconds = progress["step"], progress["seconds"]

    def save(self, out: Path) -> None:
        """Writes OUT/model and OUT/state."""
        save_model(self.model, self.config, out / "model")
        progress = {"step": self.step, "seconds": self.seconds, "settings": asdict(self.settings)}
        save_state(self.model, self.optimiser, progress, out / "state")

    def losses(self, ids: Tensor, mode: Mode) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss to minimise, its parts (nats, detached), and expert loads by layer, for ids [rows, T + 2]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model(ids[:, :-2], mode, next_tokens=ids[:, 1:-1])
        lm = F.cross_entropy(output.logits.float().flatten(0, 1), ids[:, 1:-1].flatten())
        mtp = F.cross_entropy(output.mtp_logits.float().flatten(0, 1), ids[:, 2:].flatten())
        total = lm + MTP_WEIGHT * mtp + output.index_loss
        parts = {"lm": lm.detach(), "mtp": mtp.detach(), "index_kl": output.index_loss.detach()}
        return total, parts, output.expert_loads

    def step_losses(self, step: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """What `losses` gives for the batch of a step."""
        ids = self.train.batch(self.settings.seed, step, self.schedule.rows(step), self.schedule.length(step) + 2)
        return self.losses(ids, self.schedule.mode(step))

    def train_step(self) -> dict[str, Tensor]:
        """One step; returns what the log needs, still on the device."""
        total, parts, loads = self.step_losses(self.step)
        total.backward()
        norms = [torch.nn.utils.clip_grad_norm_(group, 1.0) for group in self.clip_groups]
        factor = self.schedule.rate_factor(self.step)
        self.optimiser.step(factor)
        self.balance(loads, factor)
        self.step += 1
        heaviest = torch.stack([load.max() for load in loads.values()]).max()
        return parts | {"grad_norm": norms[0], "heaviest_expert": heaviest * self.model.c.n_routed_experts}

    @torch.no_grad()
    def balance(self, loads: dict[str, Tensor], factor: float) -> None:
        """Moves every router bias a little towards an even load."""
        for name, load in loads.items():
            bias = self.model.get_submodule(name).ffn.gate.bias
            bias += BALANCE_RATE * factor * torch.sign(1.0 / load.numel() - load)

    def quick_evaluation(self) -> dict[str, float]:
        """Held-out bits per byte on a fixed slice, with the indexer's choice."""
        s = self.settings
        on_gpu = self.device.type == "cuda"
        self.model.eval()
        with Fusible.plain_only():
            result = bits_per_byte(
                self.model,
                self.heldout,
                Mode("indexer"),
                rows=8,
                window=s.evaluation_window,
                max_windows=s.evaluation_windows,
                autocast=on_gpu,
            )
        self.model.train()
        return {"heldout_bits_per_byte": result["bits_per_byte"], "heldout_mtp": result.get("mtp_bits_per_byte", 0.0)}

    def run(self, out: Path, deadline: float, stop_at: int | None = None, say: Callable[[str], None] = print) -> bool:
        """Trains until the last step, `stop_at` or the deadline (time.monotonic()), saves, and says whether it is done.

        Raises:
            FloatingPointError: a loss that is not finite; the last saved state stays as it was.
        """
        out.mkdir(parents=True, exist_ok=True)
        last = min(self.settings.total_steps, stop_at or self.settings.total_steps)
        clock = saved = time.monotonic()
        tokens_since, steps_since = 0, 0
        with (out / "log.jsonl").open("a") as log:

            def record(entry: dict) -> None:
                log.write(json.dumps(entry) + "\n")
                log.flush()
                say(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in entry.items()))

            while self.step < last:
                length = self.schedule.length(self.step)
                values = self.train_step()
                tokens_since += length * self.schedule.rows(self.step - 1)
                steps_since += 1
                logged = self.step % self.settings.log_every == 0 or self.step == last or self.step <= 3
                if logged:
                    numbers = {name: float(value) for name, value in values.items()}  # waits for the device
                now = time.monotonic()
                if logged:
                    self.seconds += now - clock
                    if not all(math.isfinite(number) for number in numbers.values()):
                        raise FloatingPointError(f"step {self.step}: a loss is not finite: {numbers}")
                    speed = tokens_since / (now - clock)
                    per_step = (now - clock) / steps_since
                    record(
                        {"step": self.step, "length": length, "lm_bits": numbers.pop("lm") / LN2}
                        | {"mtp_bits": numbers.pop("mtp") / LN2, **numbers}
                        | {"rate": self.schedule.rate_factor(self.step - 1), "tokens_per_s": round(speed)}
                        | {"seconds": round(self.seconds, 1), "steps_left_in_time": int((deadline - now) / per_step)}
                    )
                    clock, tokens_since, steps_since = now, 0, 0
                if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.total_steps:
                    record({"step": self.step} | self.quick_evaluation())
                    clock = time.monotonic()
                    tokens_since, steps_since = 0, 0
                if time.monotonic() - saved > self.settings.save_every_seconds:
                    self.save(out)
                    saved = clock = time.monotonic()
                    tokens_since, steps_since = 0, 0
                if now >= deadline:
                    break
        self.save(out)
        return self.step >= self.settings.total_steps
