"""Dropout: the generator, its mapping to weights, its statistics, and the same mask in both directions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flash4_torch
from flash4_torch import testing
from flash4_torch.reference.dropout import Dropout, philox, thresholds

WORD = 0xFFFFFFFF

# Known answers published with Random123, the authors' own implementation.
KNOWN = {
    7: {
        (0, 0, 0, 0, 0, 0): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (WORD,) * 6: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    },
    10: {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (WORD,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    },
}


def philox_in_python(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """The generator again, on Python's integers."""
    x, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k[0], p1 & WORD, (p0 >> 32) ^ x[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return tuple(x)


@pytest.mark.parametrize("rounds", KNOWN)
def test_known_answers(rounds: int) -> None:
    for words, answer in KNOWN[rounds].items():
        tensors = [torch.tensor(w) for w in words]
        result = philox(tuple(tensors[:4]), tuple(tensors[4:]), rounds)
        assert tuple(int(x) for x in result) == answer


@given(st.tuples(*[st.integers(0, WORD)] * 6))
def test_tensor_arithmetic_is_exact(words: tuple[int, ...]) -> None:
    tensors = [torch.tensor(w) for w in words]
    result = philox(tuple(tensors[:4]), tuple(tensors[4:]), 7)
    assert tuple(int(x) for x in result) == philox_in_python(words[:4], words[4:], 7)


def kept_by_definition(seed: int, offset: int, head: int, i: int, j: int, p: float) -> bool:
    """One weight of the mapping that the module's docstring fixes for every kernel."""
    key = (seed & WORD, (seed >> 32) & WORD)
    columns, rows = (j >> 4) * 4 + ((j >> 1) & 3), (i >> 4) * 4 + (i >> 2 & 1) * 2
    words = [
        word
        for call in range(2)
        for word in philox_in_python((columns, rows + call, head, offset & WORD), key, 7)
    ]
    i3, i1, i0, j3, j0 = (i >> 3) & 1, (i >> 1) & 1, i & 1, (j >> 3) & 1, j & 1
    e = 16 * i1 + 8 * i0 + 4 * j0 + 2 * j3 + i3
    number = sum((word >> e & 1) << k for k, word in enumerate(words))
    mixed = words[0] ^ (words[1] >> 16) ^ (words[1] << 16 & WORD)
    t, f = thresholds(p)
    return number >= t + (mixed < f)


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.999, 1.0]),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
)
def test_mapping(seed: int, offset: int, p: float, i: int, j: int) -> None:
    dropout = Dropout(torch.tensor([seed, offset]), p)
    rows, keys = range(i, i + 3), range(j, j + 5)
    kept = dropout.keep(range(1, 2), 3, rows, keys)
    for h, r, c in itertools.product(range(3), range(3), range(5)):
        assert kept[0, h, r, c] == kept_by_definition(seed, offset, 3 + h, i + r, j + c, p)


@given(st.integers(0, 99), st.tuples(*[st.integers(0, 60)] * 2), st.tuples(*[st.integers(1, 40)] * 2))
def test_mask_does_not_depend_on_the_tile(seed: int, start: tuple[int, int], size: tuple[int, int]) -> None:
    dropout = Dropout(torch.tensor([seed, 7]), 0.3)
    whole = dropout.keep(range(3), 2, range(100), range(100))
    rows, keys = (range(a, a + n) for a, n in zip(start, size, strict=True))
    tile = dropout.keep(range(1, 3), 2, rows, keys)
    assert torch.equal(tile, whole[1:, :, rows.start : rows.stop, keys.start : keys.stop])


@pytest.mark.parametrize("sizes", list(itertools.product((0, 1), (0, 2), (0, 3), (0, 17))))
def test_nothing_is_kept_of_nothing(sizes: tuple[int, int, int, int]) -> None:
    B, Hq, Sq, Sk = sizes
    assert testing.dropout_mask(torch.tensor([1, 2]), B, Hq, Sq, Sk, 0.3).shape == sizes


@pytest.mark.parametrize("p", [0.0005, 0.003, 0.1, 0.25, 0.5, 0.9, 0.9995])
def test_share_dropped(p: float) -> None:
    """Over 2^22 weights, within five standard deviations; also for p that no byte can express."""
    kept = Dropout(torch.tensor([11, 3]), p).keep(range(4), 4, range(512), range(512))
    n = kept.numel()
    # 32 weights share whether their threshold is one more: at most 32 * (1/256)^2 / 4 more variance.
    deviation = math.sqrt(n * (p * (1 - p) + 1 / 8192))
    assert abs(n - int(kept.sum()) - n * p) < 5 * deviation


@pytest.mark.parametrize("p", [0.5 / 256, 1.5 / 256, 0.3])
def test_every_place_of_a_tile_is_dropped_as_often(p: float) -> None:
    """Also where it takes the 33rd bit to decide: that has to be independent of each weight's own eight."""
    dropped = ~Dropout(torch.tensor([2, 9]), p).keep(range(4), 4, range(1024), range(1024))
    shares = dropped.view(16, 64, 16, 64, 16).double().mean((0, 1, 3))
    assert (shares - p).abs().max() < 5 * math.sqrt(p * (1 - p) / 2**16)


@pytest.mark.parametrize(
    "shift", [(0, 1), (1, 0), (0, 8), (8, 0), (0, 2), (2, 0), (16, 0), (0, 16), (1, 1), (8, 8)]
)
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    kept = Dropout(torch.tensor([5, 0]), 0.3).keep(range(1), 4, range(1024), range(1024)).double() - 0.7
    di, dj = shift
    a, b = kept[:, :, di:, dj:], kept[:, :, : 1024 - di, : 1024 - dj]
    correlation = (a * b).mean() / 0.21
    assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_heads_batches_seeds_and_offsets_differ() -> None:
    masks = [
        Dropout(torch.tensor([seed, offset]), 0.5).keep(range(2), 2, range(64), range(64)).flatten(0, 1)
        for seed, offset in ((1, 0), (2, 0), (1, 1), (1 + 2**32, 0))
    ]
    agreement = [(a == b).double().mean() for a, b in itertools.combinations(torch.cat(masks), 2)]
    assert max(abs(x - 0.5) for x in agreement) < 0.05


def test_extremes() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in "qkv")
    out = flash4_torch.attention(q, k, v, dropout_p=1.0)
    out.sum().backward()
    assert (out == 0).all() and all((x.grad == 0).all() for x in (q, k, v))
    # A probability too small to hit any of 50 weights: nothing but the scale may change.
    torch.testing.assert_close(
        flash4_torch.attention(q, k, v, dropout_p=1e-9), flash4_torch.attention(q, k, v), rtol=1e-6, atol=1e-6
    )


def test_peek_is_what_the_next_call_draws() -> None:
    q = k = torch.randn(2, 33, 2, 4)
    v = torch.eye(33).expand(2, 2, 33, 33).transpose(1, 2)
    rng_state = testing.peek_rng_state()
    weights = flash4_torch.attention(q, k, v, dropout_p=0.4).transpose(1, 2)
    mask = testing.dropout_mask(rng_state, 2, 2, 33, 33, 0.4)
    assert torch.equal(weights != 0, mask)
    undropped = flash4_torch.attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(weights, undropped * mask / 0.6)


def test_torchs_generator_rules() -> None:
    q = torch.randn(1, 40, 2, 8)
    torch.manual_seed(3)
    first, second = (flash4_torch.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(flash4_torch.attention(q, q, q, dropout_p=0.5), first)
    assert not torch.equal(first, second)
