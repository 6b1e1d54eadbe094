"""The text and the models of train_text.py: Python's documentation, and an nn.TransformerEncoder.

A decoder is causal and predicts each next token. An encoder sees whole texts of different lengths, padded to
one length, and predicts the tokens that were replaced by a gap.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def documentation_paragraphs() -> list[str]:
    """The English prose of Python's documentation topics, one string per paragraph, each once.

    Code, grammar rules and headings are left out, and marks of emphasis and quotation are removed.
    """
    blocks = "\n\n".join(text for _, text in sorted(topics.items())).split("\n\n")
    lines = [" ".join(block.split()).translate({ord(mark): None for mark in '*"`'}) for block in blocks]
    prose = [line for line in lines if re.fullmatch(r"[A-Z].*[.:]", line) and "::=" not in line]
    return list(dict.fromkeys(prose))


def library_paragraphs() -> list[str]:
    """The modules of Python's standard library, without tests and packages: a hundred times as much text."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    return [block for block in text.split("\n\n") if block.isascii() and block.strip()]


class Tokenizer:
    """A tokenizer with one token per frequent word; every other word is spelled in single characters."""

    def __init__(self, text: str, frequent: int = 2000) -> None:
        words = Counter(word for word in self._split(text) if len(word) > 1)
        self.tokens = sorted(set(text)) + [word for word, _ in words.most_common(frequent)]
        self._index = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        spelled = ([word] if word in self._index else word for word in self._split(text))
        return [self._index[token] for tokens in spelled for token in tokens]

    def decode(self, indices: list[int]) -> str:
        return "".join(self.decode_each(indices))

    def decode_each(self, indices: list[int]) -> list[str]:
        return [self.tokens[i] for i in indices]

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r" ?\w+|\W", text)


@dataclass
class Corpus:
    """Token streams (T,): nine of ten paragraphs for training, the tenth for validation."""

    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, library: bool = False) -> "Corpus":
        paragraphs = library_paragraphs() if library else documentation_paragraphs()
        tokenizer = Tokenizer("\n".join(paragraphs))
        held_out = paragraphs[::10]
        learned = [paragraph for i, paragraph in enumerate(paragraphs) if i % 10]
        streams = (torch.tensor(tokenizer.encode("\n".join(part))) for part in (learned, held_out))
        return cls(tokenizer, *streams)


class Batch(NamedTuple):
    """A model's inputs and its targets."""

    tokens: Tensor
    """(B, S)."""
    targets: Tensor
    """(B, S), `IGNORED` where there is no target."""
    padding: Tensor | None
    """(B, S), True where there is no text."""

    def to(self, device: str) -> "Batch":
        padding = None if self.padding is None else self.padding.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), padding)


IGNORED = -100
GAPS = 0.15
"""Share of tokens that an encoder has to predict."""


def random_windows(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Takes `batch` windows of `length` tokens, (B, length), at random places of a (T,) stream."""
    starts = torch.randint(len(stream) - length, (batch, 1), generator=generator)
    return stream[starts + torch.arange(length)]


def next_token_batch(windows: Tensor) -> Batch:
    """A batch from windows (B, S + 1): each token is predicted from those before it."""
    return Batch(windows[:, :-1], windows[:, 1:], None)


def gaps_batch(windows: Tensor, gap: int, generator: torch.Generator) -> Batch:
    """A batch from windows (B, S): texts of half a window to a whole one, with tokens replaced by `gap`."""
    B, S = windows.shape
    lengths = torch.randint(S // 2, S + 1, (B, 1), generator=generator)
    padding = torch.arange(S) >= lengths
    asked = (torch.rand(B, S, generator=generator) < GAPS) & ~padding
    return Batch(windows.masked_fill(asked, gap), windows.masked_fill(~asked, IGNORED), padding)


class LanguageModel(nn.Module):
    """Tokens (B, S) -> logits (B, S, vocabulary). The last token of the vocabulary is an encoder's gap."""

    causal_mask: Tensor | None

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        context: int,
        dropout: float,
        causal: bool = True,
    ):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.logits = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(context) if causal else None
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        if self.causal_mask is None:
            x = self.encoder(x, src_key_padding_mask=padding)
        else:
            x = self.encoder(x, mask=self.causal_mask[:length, :length], is_causal=True)
        return self.logits(x)


def loss_of(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean cross entropy in nats per token."""
    logits = model(batch.tokens, batch.padding)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def continue_text(model: LanguageModel, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and `count` more tokens, sampled from the model's predictions at a temperature of 0.6."""
    device = model.logits.weight.device
    context = model.position.num_embeddings
    tokens = torch.tensor([tokenizer.encode(prompt)], device=device)
    for _ in range(count):
        scores = model(tokens[:, -context:])[0, -1]
        drawn = torch.multinomial((scores.float() / 0.6).softmax(-1), 1)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return tokenizer.decode(tokens[0].tolist())


@torch.no_grad()
def fill_gaps(model: LanguageModel, tokenizer: Tokenizer, tokens: Tensor, every: int = 7) -> str:
    """Tokens (S,) as text, with each `every`-th one in brackets, as the model guesses it from the others."""
    gap = len(tokenizer.tokens)
    asked = torch.arange(len(tokens)) % every == every - 1
    seen = tokens.masked_fill(asked, gap)[None].to(model.logits.weight.device)
    guesses = model(seen)[0, :, :gap].argmax(-1).cpu()
    words = tokenizer.decode_each(torch.where(asked, guesses, tokens).tolist())
    return "".join(f"[{word}]" if gone else word for word, gone in zip(words, asked.tolist(), strict=True))
