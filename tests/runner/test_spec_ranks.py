"""Two ranks that share experts verify different numbers of rows in one step, and one of them none."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from engine.memory.pools import KVState
from engine.messages import RunStep, StepDone
from engine.model.groups import ALONE
from engine.runner.collectives import close_groups, open_groups
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner
from tests.ranks.workers import SILENT_S, SMALL, Build
from tests.runner.scripted_drafter import ScriptedDrafter
from tests.runner.spec_driver import BLOCK, CPU, GREEDY, SpecDriver, plain_texts, prompt

RANKS, STEPS = 2, 9
BUILD = Build(tuple(SMALL.items()))
PROMPTS = {1: prompt(30, 1), 2: prompt(21, 2)}
TOTALS = {1: 36, 2: 58}


def steps_of(rank: int, runner: StepRunner) -> list[RunStep]:
    """A rank's steps, all planned before the first one runs: a prompt, then rounds."""
    driver, slot = SpecDriver(runner), rank + 1
    stream = driver.stream(slot, PROMPTS[slot], GREEDY, TOTALS[slot])
    steps = [driver.plan_round([(stream, len(PROMPTS[slot]))]).step]
    steps += [driver.plan_round([(stream, BLOCK + 1)]).step for _ in range(STEPS)]
    chunks = tuple((-1, len(ids), 1) for ids in PROMPTS.values())
    rounds = ((1, BLOCK + 1, BLOCK + 1),) * RANKS
    return [msgspec.structs.replace(step, ranks=rounds if n else chunks) for n, step in enumerate(steps)]


def live(rank: int, meet_at: str, texts: dict[int, list[int]], pipe: Connection) -> None:
    """A rank's life: runs its steps, sends what they answer."""
    torch.set_num_threads(1)
    groups = open_groups(rank, RANKS, RANKS, CPU, meet_at, SILENT_S)
    model = BUILD.model(groups)
    state = KVState(model.config, 4, 9, 9, CPU, torch.float32)
    drafter = ScriptedDrafter(BLOCK, (1, 2))
    drafter.texts = texts
    # The second rank's drafts are wrong now and then.
    drafter.wrong = {(2, 24), (2, 33), (2, 34)}
    runner = StepRunner(model, state, (1,), Speculation(drafter, state, "compact"))
    pipe.send([runner.execute(step) for step in steps_of(rank, runner)])
    close_groups(groups)


def test_ranks_verify_what_they_have_and_give_the_text_of_one(tmp_path: Path) -> None:
    texts = plain_texts(BUILD.model(ALONE), PROMPTS, 45)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        own, far = context.Pipe()
        process = context.Process(target=live, args=(rank, f"file://{tmp_path}/ranks", texts, far))
        process.start()
        pipes.append(own)
        processes.append(process)
    answers: list[list[StepDone]] = []
    for pipe in pipes:
        assert pipe.poll(4 * SILENT_S), "a rank is silent"
        answers.append(pipe.recv())
    for process in processes:
        process.join(SILENT_S)
        assert process.exitcode == 0
    for rank, done in enumerate(answers):
        slot = rank + 1
        ids = torch.frombuffer(bytearray(b"".join(step.token_ids for step in done)), dtype=torch.int32)
        assert PROMPTS[slot] + ids.tolist() == texts[slot][: TOTALS[slot]]
    rows = [[step.verified[0] for step in done] for done in answers]
    assert rows[0] == [0, BLOCK] + [0] * (STEPS - 1)
    assert rows[1][1] == BLOCK + 1
    assert rows[1][-1] == 0
