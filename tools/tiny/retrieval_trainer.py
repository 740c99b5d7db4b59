"""Continued training of a checkpoint on documents with planted lines, mixed with ordinary text."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.checkpoint import load_model
from tools.tiny.dense_attention import Marks, Mode
from tools.tiny.dense_parts import Fusible
from tools.tiny.needles import NeedleBatch, NeedleStream
from tools.tiny.retrieval_evaluation import DISTANCES, accuracy
from tools.tiny.retrieval_schedule import BLOCK_ROWS, RetrievalSchedule
from tools.tiny.schedule import MTP_WEIGHT
from tools.tiny.trainer import LN2, Settings, Trainer
from tools.tiny.training_data import TokenStream

ANSWER_WEIGHT = 1.0  # of the mean loss on answers against the mean loss on everything else


@dataclass(frozen=True)
class RetrievalSettings(Settings):
    """Choices of a run; written beside its log."""

    needle_documents: int = 64  # of each distance in an evaluation during training
    needle_distances: tuple[int, ...] = (256, 512, *DISTANCES)


class RetrievalTrainer(Trainer):
    """The trainer, begun from a checkpoint; held-out needles stand in held-out text and have keys of their own."""

    settings: RetrievalSettings
    schedule: RetrievalSchedule

    def __init__(
        self,
        config: dict,
        settings: RetrievalSettings,
        schedule: RetrievalSchedule,
        train: TokenStream,
        heldout: TokenStream,
        device: torch.device,
    ) -> None:
        super().__init__(config, settings, schedule, train, heldout, device)
        self.needles, self.heldout_needles = NeedleStream(train), NeedleStream(heldout)

    def start_from(self, folder: Path) -> None:
        """Takes the weights of a saved model."""
        self.model.load_state_dict(load_model(folder, self.device).state_dict())

    def step_losses(self, step: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        seed, rows, length = self.settings.seed, self.schedule.rows(step), self.schedule.length(step) + 2
        needles = self.needles.training_batch(seed, step, rows // 2, length).to(self.device)
        text = self.train.batch(seed, step, rows // 2, length)
        return self.retrieval_losses(text, needles, self.schedule.mode(step), self.schedule.csa_alone(step))

    def retrieval_losses(
        self, text: Tensor, needles: NeedleBatch, mode: Mode, csa_alone: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """As `losses`, for ordinary text [rows, T + 2] and needle documents [rows, T + 2].

        Values in planted lines, which nothing foretells, cost nothing; values in answers cost ANSWER_WEIGHT in all.
        """

        def with_text(mask: Tensor) -> Tensor:
            return torch.cat((torch.zeros_like(text, dtype=torch.bool), mask))

        ids = torch.cat((text, needles.ids))
        answers, unknown = with_text(needles.answers), with_text(needles.unknown)
        hidden = with_text(needles.question_lines)[:, :-2] & csa_alone
        marks = Marks(answers=answers[:, 1:-1], no_coarse=hidden)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model(ids[:, :-2], mode, next_tokens=ids[:, 1:-1], marks=marks)
        nats = token_losses(output.logits, ids[:, 1:-1])
        asked = answers[:, 1:-1]
        answer = mean(nats, asked)
        lm = mean(nats, ~(asked | unknown[:, 1:-1]))
        mtp = mean(token_losses(output.mtp_logits, ids[:, 2:]), ~(answers | unknown)[:, 2:])
        total = lm + ANSWER_WEIGHT * answer + MTP_WEIGHT * mtp + output.index_loss
        parts = {"lm": lm, "mtp": mtp, "index_kl": output.index_loss, "answer_bits": answer / LN2}
        right = output.logits.detach().argmax(-1) == ids[:, 1:-1]
        parts["answer_digits"] = mean(right.float(), asked)
        return total, {name: value.detach() for name, value in parts.items()}, output.expert_loads

    def quick_evaluation(self) -> dict[str, float]:
        """Also values found with the indexer's choice: at the distances that the present length holds, at last at all."""
        result = super().quick_evaluation()
        ended = self.step >= self.settings.total_steps
        longest = math.inf if ended else self.schedule.length(self.step)
        self.model.eval()
        with Fusible.plain_only():
            for distance in self.settings.needle_distances:
                if distance > longest:
                    continue
                found = accuracy(
                    self.model,
                    self.heldout_needles,
                    distance,
                    Mode("indexer", quantise_cache=True, block_rows=BLOCK_ROWS),
                    self.settings.needle_documents,
                    self.device,
                    autocast=self.device.type == "cuda",
                )
                result[f"found_at_{distance}"] = found["values"]
        self.model.train()
        return result


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every token in nats, float32 [rows, T], for logits [rows, T, V]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is True; 0 where it nowhere is."""
    return (values * mask).sum() / mask.sum().clamp_min(1)
