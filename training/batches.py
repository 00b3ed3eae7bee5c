"""Training rows, resident on the device: slices of the corpus stream, and packed chat examples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROW = 2048
# A chat row has labels on its answers only, a fifth of its ids; tripled, they weigh somewhat less than a
# corpus row.
CHAT_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, labels (-1: none) int64 and weights float32, each [B, ROW]; corpus rows come first."""

    ids: Tensor
    labels: Tensor
    weights: Tensor
    corpus_rows: int


class CorpusRows:
    """Rows cut from the stream without overlap, in a new order and at new cuts each epoch."""

    def __init__(self, tokens: np.ndarray, device: torch.device, rank: int, world: int, seed: int) -> None:
        self.tokens = torch.from_numpy(tokens).to(device)
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch = -1
        self.starts = torch.empty(0, dtype=torch.int64)
        self.at = 0

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.at = 0
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        offset = int(torch.randint(0, ROW, (1,), generator=generator))
        count = (len(self.tokens) - 1 - offset) // ROW
        order = torch.randperm(count, generator=generator)[self.rank :: self.world]
        self.starts = (offset + order * ROW).to(self.tokens.device)

    def take(self, rows: int) -> Tensor:
        """Ids [rows, ROW + 1] int64."""
        if self.at + rows > len(self.starts):
            self._next_epoch()
        starts = self.starts[self.at : self.at + rows]
        self.at += rows
        span = torch.arange(ROW + 1, device=self.tokens.device)
        return self.tokens[starts[:, None] + span].long()

    def state(self) -> tuple[int, int]:
        """Epoch and position in it."""
        return self.epoch, self.at

    def load(self, state: tuple[int, int]) -> None:
        """Continues where `state` was taken."""
        self.epoch = state[0] - 1
        self._next_epoch()
        self.at = state[1]


class ChatRows:
    """Rows of packed examples from the shards of a folder; shards may still be arriving."""

    def __init__(self, folder: Path, device: torch.device, rank: int, world: int) -> None:
        self.folder, self.device, self.rank, self.world = folder, device, rank, world
        self.seen: set[str] = set()
        self.ids = torch.empty(0, ROW, dtype=torch.int16, device=device)
        self.answers = torch.empty(0, ROW, dtype=torch.bool, device=device)
        self.order = torch.empty(0, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(rank)
        self.epochs = 0

    def refresh(self) -> None:
        """Loads shards that have arrived since; new rows are mixed with those not used yet."""
        fresh = [p for p in sorted(self.folder.glob("tasks-*.npz")) if p.name not in self.seen]
        if not fresh:
            return
        self.seen.update(p.name for p in fresh)
        ids, answers = [self.ids], [self.answers]
        for path in fresh:
            with np.load(path) as shard:
                rows = shard["ids"][self.rank :: self.world]
                marks = np.unpackbits(shard["answers"], axis=1)[self.rank :: self.world].astype(bool)
            ids.append(torch.from_numpy(rows).to(self.device))
            answers.append(torch.from_numpy(marks).to(self.device))
        old = len(self.ids)
        self.ids, self.answers = torch.cat(ids), torch.cat(answers)
        self.order = torch.cat((self.order, torch.arange(old, len(self.ids))))
        self.order = self.order[torch.randperm(len(self.order), generator=self.generator)]

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        """Ids and labels [rows, ROW] int64; needs at least `rows` loaded rows."""
        if len(self.order) < rows:
            self.epochs += 1
            self.order = torch.randperm(len(self.ids), generator=self.generator)
        taken, self.order = self.order[:rows].to(self.device), self.order[rows:]
        ids = self.ids[taken].long()
        following = torch.roll(ids, -1, 1)
        marks = torch.roll(self.answers[taken], -1, 1)
        marks[:, -1] = False
        return ids, torch.where(marks, following, -1)


def mixed_batch(corpus: CorpusRows, chat: ChatRows, rows: int, chat_share: float) -> Batch:
    """A batch with round(rows * chat_share) chat rows, none while there are too few shards."""
    chat_rows = round(rows * chat_share)
    if len(chat.ids) < chat_rows:
        chat_rows = 0
    text = corpus.take(rows - chat_rows)
    ids, labels = text[:, :-1], text[:, 1:]
    weights = torch.ones(rows, ROW, device=ids.device)
    if chat_rows:
        chat_ids, chat_labels = chat.take(chat_rows)
        ids, labels = torch.cat((ids, chat_ids)), torch.cat((labels, chat_labels))
        weights[-chat_rows:] = CHAT_WEIGHT
    weights = weights * (labels >= 0)
    return Batch(ids.contiguous(), labels.contiguous(), weights, rows - chat_rows)
