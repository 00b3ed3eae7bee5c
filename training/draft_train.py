"""Trains the draft of the shipped target for a given time.

    python -m training.draft_train --data D --texts ROWS.npz --out R --minutes 7

The target is frozen; its taps and hidden rows are computed anew in every step, which costs about as much as
the draft itself and needs no store of them. The schedule hangs on the share of `--minutes` that has passed.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.model.tokenizer import load_tokenizer
from training.batches import ROW, ChatRows, CorpusRows
from training.draft_data import ANSWERED
from training.draft_generate import load_target
from training.draft_loss import Targets, block_targets, choose_blocks, losses, text_starts
from training.draft_model import Draft, DraftShape, initialise_draft, observe
from training.geometry import Geometry
from training.model import Model, compile_model, use_bf16
from training.optimizer import Optimizer
from training.start import pick_device
from training.tokenizer import BOS

SEED = 20261130
PEAK_RATE, FINAL_RATE_SHARE = 3e-3, 0.02
WARM_UP, DECAY_FROM, QUANTISE_FROM = 0.03, 0.35, 0.80
BIAS_RATE = 2e-3
REPORT_EVERY, WATCH_EVERY = 100, 500
# Rows of 16: what the target wrote, running text, its own training chats.
MIXTURE = (10, 4, 2)
# How much a token counts as a label, by what it is in its row: padding, prompt, answer.
WORTH = (0.0, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, ROW] int64 and how much each counts as a label [B, ROW] float32."""

    ids: Tensor
    wanted: Tensor


class Mixer:
    """Batches of the three kinds of rows; the last rows of what the target wrote are watched, never taken."""

    def __init__(self, data: Path, texts: Path, rows: int, device: torch.device) -> None:
        with np.load(texts) as file:
            every, marks = (torch.from_numpy(file[name]).to(device) for name in ("ids", "marks"))
        self.ids, self.marks = every[:-rows], marks[:-rows]
        self.watched = Batch(every[-rows:].long(), (marks[-rows:] == ANSWERED).float())
        self.corpus = CorpusRows(np.load(data / "corpus.npy"), device, 0, 1, SEED)
        self.chat = ChatRows(data / "tasks", device, 0, 1)
        self.chat.refresh()
        self.counts = [rows * share // sum(MIXTURE) for share in MIXTURE]
        self.counts[0] += rows - sum(self.counts)
        self.worth = torch.tensor(WORTH, device=device)
        self.order = torch.empty(0, dtype=torch.int64)

    def take(self) -> Batch:
        """The next batch; texts are used once an epoch, in a new order each."""
        own, text, chat = self.counts
        if len(self.order) < own:
            self.order = torch.randperm(len(self.ids))
        taken, self.order = self.order[:own].to(self.ids.device), self.order[own:]
        ids, wanted = [self.ids[taken].long()], [self.worth[self.marks[taken].long()]]
        if text:
            ids.append(self.corpus.take(text)[:, :ROW])
            wanted.append(torch.ones_like(ids[-1], dtype=torch.float32))
        if chat:
            rows, labels = self.chat.take(chat)
            ids.append(rows)
            wanted.append(torch.roll((labels >= 0).float(), 1, 1))
        return Batch(torch.cat(ids).contiguous(), torch.cat(wanted))


@dataclass(slots=True)
class Record:
    """What has happened."""

    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    blocks: int = 0
    curves: list[dict[str, float]] = field(default_factory=list)
    watched: list[dict[str, object]] = field(default_factory=list)


def rate_at(progress: float) -> float:
    """Learning rate at a share of the budget."""
    warm = min(progress / WARM_UP, 1.0)
    left = min((1 - progress) / (1 - DECAY_FROM), 1.0)
    return PEAK_RATE * warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * max(left, 0.0))


def table(accepted: Tensor, targets: Targets, block: int) -> tuple[list[float], float]:
    """Mean acceptance at each position, and 1 + the mean sum of its products, of blocks with all labels."""
    whole = (targets.weights.view(-1, block) > 0).all(1)
    chance = accepted.view(-1, block)[whole]
    return chance.mean(0).tolist(), 1 + float(chance.cumprod(1).sum(1).mean())


class DraftTrainer:
    """A frozen target, its draft and the optimizer."""

    def __init__(self, target: Model, device: torch.device, per_chunk: int, bos: int) -> None:
        self.target, self.device, self.per_chunk, self.bos = target, device, per_chunk, bos
        self.draft = Draft(Geometry(), DraftShape())
        initialise_draft(self.draft, target, SEED)
        self.draft = self.draft.to(device)
        if device.type == "cuda":
            use_bf16(self.draft)
        self.optimizer = Optimizer(self.draft)
        self.losses = losses
        self.generator = torch.Generator(device).manual_seed(SEED)

    def compile(self) -> None:
        """Fixed shapes from here on."""
        compile_model(self.target)
        for stage in self.draft.blocks():
            for half in ("attention_half", "expert_half"):
                setattr(stage, half, torch.compile(getattr(stage, half), dynamic=False, fullgraph=True))
        self.draft.mix.compile(dynamic=False, fullgraph=True)
        self.losses = torch.compile(losses, dynamic=False, fullgraph=True)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Targets, list[Tensor]]:
        """Loss, acceptance, estimate, what they belong to, and the experts' loads."""
        shape = self.draft.shape
        starts = text_starts(batch.ids, self.bos)
        blocks = choose_blocks(batch.wanted, starts, self.per_chunk, self.generator)
        targets = block_targets(batch.ids, batch.wanted, starts, blocks, shape.block)
        taps, final = observe(self.target, batch.ids, shape.taps)
        hidden, loads = self.draft(batch.ids, self.target.embed.weight, taps, blocks)
        seen = final.flatten(0, 1)[targets.seen]
        head = self.target.head.weight
        loss, accepted, estimate = self.losses(
            self.draft, hidden, seen, head, targets.labels, targets.previous, targets.weights
        )
        return loss, accepted, estimate, targets, loads

    def step(self, batch: Batch, progress: float) -> tuple[Tensor, Tensor, Tensor, Targets]:
        """One optimizer step."""
        loss, accepted, estimate, targets, loads = self.forward(batch)
        torch.autograd.backward(loss)
        self.optimizer.step(rate_at(progress), progress >= QUANTISE_FROM)
        self.optimizer.zero_grad()
        self.balance(loads, BIAS_RATE * min(2 * (1 - progress), 1.0))
        return loss.detach(), accepted, estimate, targets

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: float) -> None:
        """Moves each gate's bias towards its less loaded experts."""
        for stage, load in zip(self.draft.blocks(), loads, strict=True):
            stage.ffn.gate.bias.add_(torch.sign(load.mean() - load), alpha=rate)

    def state(self) -> dict[str, Tensor]:
        """Every parameter and bias as the model now computes with it, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.draft.state_dict().items()}


def train(trainer: DraftTrainer, mixer: Mixer, minutes: float) -> Record:
    """Until the budget is used."""
    record, block = Record(), trainer.draft.shape.block
    began = marked = time.monotonic()
    while (progress := (time.monotonic() - began) / (60 * minutes)) < 1.0:
        batch = mixer.take()
        loss, accepted, estimate, targets = trainer.step(batch, progress)
        record.steps += 1
        record.rows += len(batch.ids)
        record.blocks += len(targets.labels) // block
        if record.steps % REPORT_EVERY == 0:
            rates, tau = table(accepted, targets, block)
            entry = {"step": record.steps, "progress": round(progress, 4), "loss": round(float(loss), 4)}
            entry |= {"tau": round(tau, 3), "first": round(rates[0], 3), "last": round(rates[-1], 3)}
            entry["error"] = round(float((estimate - accepted).abs().mean()), 4)
            record.curves.append(entry)
            speed = REPORT_EVERY / (time.monotonic() - marked)
            marked = time.monotonic()
            print(f"{progress:6.1%} {speed:.1f} steps/s {entry}", flush=True)
        if record.steps % WATCH_EVERY == 0:
            _, accepted, _, targets, _ = trainer.forward(mixer.watched)
            rates, tau = table(accepted, targets, block)
            record.watched.append({"step": record.steps, "rates": rates, "tau": tau})
            print(f"watched {[round(r, 3) for r in rates]} tau {tau:.3f}", flush=True)
    record.seconds = time.monotonic() - began
    return record


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of corpus.npy and tasks/")
    parser.add_argument("--texts", type=Path, required=True, help="rows of training.draft_generate")
    parser.add_argument("--model", type=Path, default=Path("engine/assets/nano"), help="target's folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for draft.pt and draft.json")
    parser.add_argument("--minutes", type=float, required=True, help="training time, compilation apart")
    parser.add_argument("--rows", type=int, default=16, help="rows of 2,048 tokens a step")
    parser.add_argument("--per-chunk", type=int, default=32, help="blocks in 128 tokens")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = pick_device(0, 1)
    torch.manual_seed(SEED)
    bos = load_tokenizer(args.model).token_id(BOS)
    trainer = DraftTrainer(load_target(args.model, device), device, args.per_chunk, bos)
    mixer = Mixer(args.data, args.texts, args.rows, device)
    began = time.monotonic()
    if not args.eager:
        trainer.compile()
        torch.autograd.backward(trainer.forward(mixer.watched)[0])
        trainer.optimizer.zero_grad()
        trainer.forward(mixer.watched)
    print(f"ready after {time.monotonic() - began:.1f} s; {len(mixer.ids):,} rows of texts", flush=True)
    record = train(trainer, mixer, args.minutes)
    torch.save(trainer.state(), args.out / "draft.pt")
    (args.out / "draft.json").write_text(json.dumps(asdict(record)))
    print(f"done: {record.steps} steps, {record.rows:,} rows, {record.blocks:,} blocks", flush=True)


if __name__ == "__main__":
    main()
