"""The text and the model of train_text.py: Python's documentation, and a causal nn.TransformerEncoder."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def documentation_paragraphs() -> list[str]:
    """The English prose of Python's documentation topics, one string a paragraph, each once.

    Code, grammar rules and headings are left out, and the marks of emphasis and quotation are dropped.
    """
    blocks = "\n\n".join(text for _, text in sorted(topics.items())).split("\n\n")
    lines = [" ".join(block.split()).translate({ord(mark): None for mark in '*"`'}) for block in blocks]
    prose = [line for line in lines if re.fullmatch(r"[A-Z].*[.:]", line) and "::=" not in line]
    return list(dict.fromkeys(prose))


class Tokenizer:
    """Frequent words are one token each; every other word is spelled in single characters."""

    def __init__(self, text: str, frequent: int = 2000) -> None:
        words = Counter(word for word in self._split(text) if len(word) > 1)
        self.tokens = sorted(set(text)) + [word for word, _ in words.most_common(frequent)]
        self._index = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        spelled = ([word] if word in self._index else word for word in self._split(text))
        return [self._index[token] for tokens in spelled for token in tokens]

    def decode(self, indices: list[int]) -> str:
        return "".join(self.tokens[i] for i in indices)

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r" ?\w+|\W", text)


@dataclass
class Corpus:
    """Token streams of shape (T,): nine paragraphs in ten to train on, the tenth to validate on."""

    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls) -> "Corpus":
        paragraphs = documentation_paragraphs()
        tokenizer = Tokenizer("\n".join(paragraphs))
        held_out = paragraphs[::10]
        learned = [paragraph for i, paragraph in enumerate(paragraphs) if i % 10]
        streams = (torch.tensor(tokenizer.encode("\n".join(part))) for part in (learned, held_out))
        return cls(tokenizer, *streams)


def random_windows(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut `batch` windows of length + 1 tokens, (B, length + 1), at random places of a (T,) stream."""
    starts = torch.randint(len(stream) - length, (batch, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)]


class LanguageModel(nn.Module):
    """Predicts each next token from those before it: tokens (B, S) -> logits (B, S, vocabulary)."""

    causal_mask: Tensor

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int, dropout: float):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.logits = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("causal_mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        x = self.encoder(x, mask=self.causal_mask[:length, :length], is_causal=True)
        return self.logits(x)


def next_token_loss(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token, of windows (B, S + 1): each token predicted from those before."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def continue_text(model: LanguageModel, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The prompt and `count` more tokens, drawn from the model's predictions sharpened a little."""
    device = model.logits.weight.device
    context = model.position.num_embeddings
    tokens = torch.tensor([tokenizer.encode(prompt)], device=device)
    for _ in range(count):
        scores = model(tokens[:, -context:])[0, -1]
        drawn = torch.multinomial((scores.float() / 0.6).softmax(-1), 1)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return tokenizer.decode(tokens[0].tolist())
