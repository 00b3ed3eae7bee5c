"""Trains the model for a given time and saves its whole state as it goes.

    python -m training.train --data DIR --out DIR --minutes 15        (one GPU, or the CPU for a try)
    torchrun --nproc-per-node 2 -m training.train ...                 (several GPUs)

`--data` holds what training.corpus and training.packing wrote; shards of chat examples may still be arriving.
The clock starts after compilation. A run that was stopped goes on from `OUT/state.pt` when started again.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from training.batches import ROW, Batch, ChatRows, CorpusRows, mixed_batch
from training.geometry import Geometry
from training.model import STAGES, compile_model, use_bf16
from training.optimizer import Optimizer
from training.schedule import Plan, plan
from training.start import heldout_rows, new_model, pick_device

SEED = 20261129
REPORT_EVERY = 50
HELDOUT_EVERY = 300
SAVE_SECONDS = 100.0


@dataclass(slots=True)
class Record:
    """What has happened so far; saved with the state and written to curves.json."""

    steps: int = 0
    seconds: float = 0.0
    corpus_tokens: int = 0
    chat_tokens: int = 0
    curves: list[dict[str, float]] = field(default_factory=list)
    heldout: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One rank's model, optimizer and rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = pick_device(int(os.environ.get("LOCAL_RANK", 0)), self.world)
        tokens = np.load(args.data / "corpus.npy", mmap_mode="r")
        tokens = np.array(tokens[: args.max_tokens] if args.max_tokens else tokens)
        self.model = new_model(Geometry(), tokens, SEED).to(self.device)
        if self.device.type == "cuda":
            use_bf16(self.model)
        self.optimizer = Optimizer(self.model)
        self.corpus = CorpusRows(tokens, self.device, self.rank, self.world, SEED)
        self.chat = ChatRows(args.data / "tasks", self.device, self.rank, self.world)
        self.heldout = heldout_rows(args.data / "heldout.npz", args.rows).to(self.device)
        self.record = Record()

    def loss(self, batch: Batch, stage: str) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """Loss to differentiate; nats of each label; expert loads; indexer loss."""
        nats, loads, index_loss = self.model(batch.ids, batch.labels, stage)
        mean = (nats * batch.weights).sum() / batch.weights.sum().clamp(min=1.0)
        return mean + index_loss, nats.detach(), loads, index_loss.detach()

    def warm_up(self) -> None:
        """Compiles every stage before the clock starts."""
        for stage in STAGES:
            began = time.monotonic()
            batch = mixed_batch(self.corpus, self.chat, self.args.rows, 0.0)
            torch.autograd.backward(self.loss(batch, stage)[0])
            self.optimizer.zero_grad()
            self.wait()
            self.say(f"stage {stage} ready after {time.monotonic() - began:.1f} s")

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def say(self, line: str) -> None:
        """Prints on the first rank."""
        if self.rank == 0:
            print(line, flush=True)

    def step(self, now: Plan) -> dict[str, Tensor]:
        """One optimizer step; returns sums for the report, still on the device."""
        batch = mixed_batch(self.corpus, self.chat, self.args.rows, now.chat_share)
        loss, nats, loads, index_loss = self.loss(batch, now.stage)
        torch.autograd.backward(loss)
        self.optimizer.average_gradients()
        self.optimizer.step(now.rate, now.quantise)
        self.optimizer.zero_grad()
        imbalance = self._balance(loads, now.bias_rate)
        split = batch.corpus_rows
        chat_labels = (batch.labels[split:] >= 0).sum()
        self.record.steps += 1
        self.record.corpus_tokens += split * ROW * self.world
        self.record.chat_tokens += (self.args.rows - split) * ROW * self.world
        return {
            "corpus_nats": nats[:split].mean(),
            "chat_nats": nats[split:].sum() / chat_labels.clamp(min=1),
            "index_loss": index_loss,
            "imbalance": imbalance,
        }

    @torch.no_grad()
    def _balance(self, loads: list[Tensor], rate: float) -> Tensor:
        """Moves each learned gate's bias towards its less loaded experts; returns the worst load / mean."""
        stacked = torch.stack(loads)
        if self.world > 1:
            dist.all_reduce(stacked)
        mean = stacked.mean(-1, keepdim=True)
        for layer, load, average in zip(self.model.blocks(), stacked, mean, strict=True):
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias.add_(torch.sign(average - load), alpha=rate)
        return (stacked / mean).max()

    def heldout_nats(self, stage: str) -> float:
        """Mean nats a token over the held-out batch; with gradients on, as that is what is compiled."""
        rows = self.heldout
        nats, _, _ = self.model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), stage)
        return float(nats.detach().mean())

    def save(self) -> None:
        """Writes OUT/state.pt and OUT/curves.json; a crash in between leaves the older state."""
        if self.rank != 0:
            return
        biases = {n: b for n, b in self.model.named_buffers() if n.endswith(("gate.bias", "tid2eid"))}
        state = {
            "optimizer": self.optimizer.state(),
            "buffers": biases,
            "corpus": self.corpus.state(),
            "record": asdict(self.record),
        }
        part = self.args.out / "state.part"
        torch.save(state, part)
        part.rename(self.args.out / "state.pt")
        (self.args.out / "curves.json").write_text(json.dumps(asdict(self.record)))

    def resume(self) -> None:
        """Loads OUT/state.pt if it is there."""
        path = self.args.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.record = Record(**state["record"])
        self.optimizer.load(state["optimizer"], plan(self.progress(self.record.seconds)).quantise)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        self.corpus.load(state["corpus"])
        self.say(f"resumed at step {self.record.steps}, {self.record.seconds:.0f} s")

    def progress(self, seconds: float) -> float:
        """Share of the budget, the same on every rank."""
        share = torch.tensor(min(seconds / (60.0 * self.args.minutes), 1.0))
        if self.world > 1:
            dist.broadcast(share, 0)
        return float(share)

    def report(self, now: Plan, progress: float, sums: dict[str, Tensor], tokens_per_s: float) -> None:
        """One line and one entry of the curves."""
        entry = {name: round(float(value), 4) for name, value in sums.items()}
        entry.update(step=self.record.steps, progress=round(progress, 4), rate=now.rate)
        entry.update(
            tokens=self.record.corpus_tokens + self.record.chat_tokens, tokens_per_s=round(tokens_per_s)
        )
        self.record.curves.append(entry)
        self.say(
            f"{progress:6.1%} step {self.record.steps} {now.stage} rate {now.rate:.1e} "
            f"text {entry['corpus_nats']:.3f} chat {entry['chat_nats']:.3f} index {entry['index_loss']:.3f} "
            f"load {entry['imbalance']:.2f} {tokens_per_s / 1000:.0f}k tokens/s, "
            f"{entry['tokens'] / 1e6:.0f} M, chat rows {len(self.chat.ids)}"
        )

    def run(self) -> None:
        """Until the budget is used."""
        began = time.monotonic() - self.record.seconds
        saved = marked = time.monotonic()
        per_step = self.args.rows * ROW * self.world
        while (progress := self.progress(time.monotonic() - began)) < 1.0:
            if self.record.steps % REPORT_EVERY == 0:
                self.chat.refresh()
            now = plan(progress)
            sums = self.step(now)
            self.record.seconds = time.monotonic() - began
            if self.record.steps % REPORT_EVERY == 0:
                self.wait()
                speed = REPORT_EVERY * per_step / (time.monotonic() - marked)
                self.report(now, progress, sums, speed)
                marked = time.monotonic()
            if self.record.steps % HELDOUT_EVERY == 0:
                nats = self.heldout_nats(now.stage)
                self.record.heldout.append({"step": self.record.steps, "progress": progress, "nats": nats})
                self.say(f"held-out {nats:.4f} nats a token")
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()
        done = self.record
        self.say(
            f"done: {done.steps} steps, {done.corpus_tokens:,} corpus and {done.chat_tokens:,} chat tokens"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of corpus.npy, heldout.npz, tasks/")
    parser.add_argument("--out", type=Path, required=True, help="folder for state.pt and curves.json")
    parser.add_argument("--minutes", type=float, required=True, help="training time, compilation apart")
    parser.add_argument("--rows", type=int, default=32, help="rows of 2,048 tokens a step and GPU")
    parser.add_argument("--max-tokens", type=int, default=0, help="use only the start of the corpus (0: all)")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.resume()
    if not args.eager:
        compile_model(trainer.model)
        trainer.warm_up()
    trainer.run()


if __name__ == "__main__":
    main()
