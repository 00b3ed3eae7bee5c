"""Example -> token ids and loss mask, by the engine's own prompt encoder and tokenizer."""

from dataclasses import dataclass

from engine.model.encoding import Encoding
from engine.model.tokenizer import Tokenizer
from training.tasks.example import Example


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of prompt and answer. `mask[i]` is 1 where `ids[i]` is to be predicted: answer and EOS."""

    ids: list[int]
    mask: list[int]

    @property
    def prompt_length(self) -> int:
        """Tokens before the answer."""
        return len(self.mask) - sum(self.mask)


def render(example: Example, encoding: Encoding, tokenizer: Tokenizer) -> Rendered:
    """The example as the server would see it, then the wanted answer with EOS."""
    prompt = prompt_ids(example, encoding, tokenizer)
    answer = tokenizer.encode_segments(encoding.answer_segments(example.answer, thinking=example.thinking))
    return Rendered(prompt + answer, [0] * len(prompt) + [1] * len(answer))


def prompt_ids(example: Example, encoding: Encoding, tokenizer: Tokenizer) -> list[int]:
    """The prompt alone, for evaluation."""
    return tokenizer.encode_segments(encoding.segments(example.messages, **example.options))
