"""Held-out prompts keep their length limit, and the pass rate counts exactly the right answers."""

from engine.model.tokenizer import load_tokenizer
from training.tasks import answer_text
from training.tasks.checking import NANO, nano_encoding
from training.tasks.evaluation import SHORT_PROMPT, heldout_prompts, pass_rate

TOKENIZER = load_tokenizer(NANO)


def test_prompts_keep_the_limit_and_the_rate_counts_right_answers() -> None:
    prompts = heldout_prompts("json", 40, nano_encoding(), TOKENIZER)
    assert len(prompts) == 40
    assert all(len(ids) <= SHORT_PROMPT for _, ids in prompts)
    right = [TOKENIZER.encode(answer_text(example)) for example, _ in prompts]

    def three_quarters(asked: list[list[int]]) -> list[list[int]]:
        assert asked == [ids for _, ids in prompts]
        return [answer if i % 4 else answer[:2] for i, answer in enumerate(right)]

    assert pass_rate(prompts, lambda asked: right, TOKENIZER) == 1
    assert pass_rate(prompts, three_quarters, TOKENIZER) == 0.75
