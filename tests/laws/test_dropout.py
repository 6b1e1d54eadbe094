"""Dropout: the generator, its mapping to weights, its statistics, and the same mask in both directions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from flash4_torch import testing
from flash4_torch.reference import dropout as dropout_module
from flash4_torch.reference import lanes
from flash4_torch.reference.dropout import Dropout, philox, thresholds

WORD = 0xFFFFFFFF

ALMOST_ONE = math.nextafter(1.0, 0.0)
"""A probability below 1 with which nothing is kept, since it has 40 bits."""

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


def rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & WORD


def numbers_by_definition(w0: int, w1: int, w2: int, w3: int) -> tuple[tuple[int, ...], int]:
    """The eight bit planes of a call's 32 numbers, from the lowest bit up, and x, made of its four words."""
    y0, y1, y2 = rotated(w1, 12), rotated(w2, 3), rotated(w3, 19)
    y3, y4 = rotated(w0, 24), rotated(w1, 8)
    low = (w0 ^ y0 ^ y1, w1 ^ y1 ^ y2, w2 ^ y2 ^ y3, w3 ^ y3 ^ y4)
    return (*(rotated(word, 16) for word in low), w0, w1, w2, w3), y0 ^ y1 ^ y2


def kept_by_definition(seed: int, offset: int, head: int, i: int, j: int, p: float) -> bool:
    """Whether a weight is kept, by the mapping that `reference.dropout` fixes for every kernel."""
    key = (seed & WORD, (seed >> 32) & WORD)
    columns, rows = (j >> 4) * 4 + ((j >> 1) & 3), (i >> 4) * 2 + (i >> 2 & 1)
    planes, x = numbers_by_definition(*philox_in_python((columns, rows, head, offset & WORD), key, 7))
    i3, i1, i0, j3, j0 = (i >> 3) & 1, (i >> 1) & 1, i & 1, (j >> 3) & 1, j & 1
    e = 16 * i1 + 8 * i0 + 4 * j0 + 2 * j3 + i3
    number = sum((plane >> e & 1) << k for k, plane in enumerate(planes))
    t, f = thresholds(p)
    return number >= t + (x < f)


def forms() -> tuple[list[list[int]], list[int]]:
    """Masks of the call's 128 bits that are summed in each bit of each number, and in each bit of x."""
    numbers, xs = [[0] * 8 for _ in range(32)], [0] * 32
    for bit in range(128):
        planes, x = numbers_by_definition(*((1 << bit) >> 32 * n & WORD for n in range(4)))
        for e in range(32):
            xs[e] |= (x >> e & 1) << bit
            for k, plane in enumerate(planes):
                numbers[e][k] |= (plane >> e & 1) << bit
    return numbers, xs


def rank(vectors: Iterable[int]) -> int:
    """The rank over the integers modulo 2."""
    basis: list[int] = []
    for vector in vectors:
        for other in basis:
            vector = min(vector, vector ^ other)
        if vector:
            basis.append(vector)
    return len(basis)


def test_numbers_of_a_call_are_independent() -> None:
    """Any two or three numbers are independent, and most sets of four; so are x and any two numbers.

    All are sums of random bits, so ranks decide.
    """
    numbers, x = forms()
    assert rank(itertools.chain.from_iterable(plane[4:] for plane in numbers)) == 128
    assert rank(x) == 32
    dependent = {size: 0 for size in (2, 3, 4)}
    for size in dependent:
        for chosen in itertools.combinations(range(32), size):
            # The upper halves are known, so their bits drop out of the sums of the lower halves.
            seen = sum(sum(numbers[e][4:]) for e in chosen)
            lower = (form & ~seen for e in chosen for form in numbers[e][:4])
            dependent[size] += rank(lower) < 4 * size
    assert dependent == {2: 0, 3: 0, 4: 216}
    beside_x = [
        sum(
            rank([*x, *itertools.chain(*chosen)]) < 32 + 8 * size
            for chosen in itertools.combinations(numbers, size)
        )
        for size in (2, 3)
    ]
    assert beside_x == [0, 128]


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.999, ALMOST_ONE, 1.0]),
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


SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(
    SEEDS,
    st.sampled_from([0.1, 0.5, ALMOST_ONE, 1.0]),
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 40)] * 2),
)
def test_the_whole_mask_at_once(seed: int, p: float, sizes: tuple[int, int, int, int]) -> None:
    dropout, (B, H, Sq, Sk) = Dropout(torch.tensor([seed, 7]), p), sizes
    assert torch.equal(dropout.keep_all(*sizes).bool(), dropout.keep(range(B), H, range(Sq), range(Sk)))


@given(
    SEEDS,
    SEEDS,
    st.sampled_from([0.0, 1e-6, 0.1, 1 / 256, 0.5, 0.999, ALMOST_ONE, 1.0]),
    st.sampled_from([[], [3, 18, 1, 5, 4]]),
    st.tuples(*[st.integers(0, 40)] * 2),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 3),
)
def test_integers_and_tensors_make_the_same_bits(
    seed: int,
    offset: int,
    p: float,
    state: list[int],
    start: tuple[int, int],
    sizes: tuple[int, ...],
    first: int,
) -> None:
    """Few calls of the generator are lanes of one integer; the bits are those of torch's words."""
    B, H, Sq, Sk = sizes
    (i, j), dropout = start, Dropout(torch.tensor([seed, offset, *state]), p, first)
    tile = range(1, 1 + B), H, range(i, i + Sq), range(j, j + Sk)
    with mock.patch.object(lanes, "MOST", 1 << 12):
        found = dropout.keep(*tile)
    with mock.patch.object(lanes, "MOST", 0):
        assert torch.equal(dropout.keep(*tile), found)


@given(SEEDS, st.integers(0, 7), st.integers(-1, 1))
def test_integers_and_tensors_agree_at_the_threshold(seed: int, n: int, away: int) -> None:
    """Words that equal the fraction of the threshold, or are next to it, which chance never draws."""
    dropout = Dropout(torch.tensor([seed, 5]), 0.3)
    tile = range(1), 1, range(16), range(16)
    i, j, head, offset = torch.arange(2)[:, None], torch.arange(4), torch.tensor(0), torch.tensor(5)
    keys = torch.tensor(seed & WORD), torch.tensor(seed >> 32 & WORD)
    words = philox((j, i, head, offset), keys)
    _, x = numbers_by_definition(*(int(word.flatten()[n]) for word in words))
    fraction = x + away
    assume(0 <= fraction <= WORD)
    with mock.patch.object(dropout_module, "thresholds", return_value=(0, fraction)):
        found = dropout.keep(*tile)
        with mock.patch.object(lanes, "MOST", 0):
            assert torch.equal(dropout.keep(*tile), found)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 1), (0, 2), (0, 3), (0, 17))))
def test_nothing_is_kept_of_nothing(sizes: tuple[int, int, int, int]) -> None:
    B, Hq, Sq, Sk = sizes
    assert testing.dropout_mask(torch.tensor([1, 2]), B, Hq, Sq, Sk, 0.3).shape == sizes


@pytest.mark.parametrize("p", [0.0005, 0.003, 0.1, 0.25, 0.5, 0.9, 0.9995])
def test_share_dropped(p: float) -> None:
    """The share over 2^22 weights is within five standard deviations, also for p that no byte can express."""
    kept = Dropout(torch.tensor([11, 3]), p).keep(range(4), 4, range(512), range(512))
    n = kept.numel()
    # 32 weights share whether their threshold is one higher, which adds at most 32 * (1/256)^2 / 4 variance.
    deviation = math.sqrt(n * (p * (1 - p) + 1 / 8192))
    assert abs(n - int(kept.sum()) - n * p) < 5 * deviation


@pytest.mark.parametrize("p", [0.5 / 256, 1.5 / 256, 0.3])
def test_every_place_of_a_tile_is_dropped_as_often(p: float) -> None:
    """This holds also where the 33rd bit decides, which has to be independent of each weight's own eight."""
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


def calls(p: float) -> Tensor:
    """Float64 (32, 2^17), 1 where the weight is kept: each row has one weight of every call."""
    kept = Dropout(torch.tensor([8, 4]), p).keep(range(4), 4, range(512), range(512))
    bits = kept.view(16, *(32, 2, 2, 2, 2) * 2).permute(2, 4, 5, 7, 10, 0, 1, 3, 6, 8, 9)
    return bits.reshape(32, -1).double()


SHARES = [1 / 256, 8.5 / 256, 0.1, 0.9]
"""The first two make weights tie in the upper half of their number, so that the lower half decides."""


@pytest.mark.parametrize("p", SHARES)
def test_pairs_and_triples_of_a_call_are_independent(p: float) -> None:
    """All products of two and of three standardised keep bits have the mean 0 that independence gives."""
    kept = (calls(p) - (1 - p)) / math.sqrt(p * (1 - p))
    n, odds = kept.shape[1], max(p / (1 - p), (1 - p) / p)
    # Bernstein's bound for a probability of e^-16; the products have variance 1 and are at most
    # odds^(factors / 2).
    bound = {factors: math.sqrt(32 / n) + 16 * odds ** (factors / 2) / (3 * n) for factors in (2, 3)}
    # Sharing x correlates two weights by at most this.
    shared = 1 / (4 * 256**2 * p * (1 - p))
    for e in range(1, 32):
        before = kept[:e]
        assert (before @ kept[e] / n).abs().max() < bound[2] + shared
        triples = (kept[e] * before) @ before.T / n
        assert triples.fill_diagonal_(0).abs().max() < bound[3] + shared


@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_how_many_of_neighbouring_weights_are_kept(p: float, size: int) -> None:
    """Counts of kept weights within a call are binomial: chi-square, within five standard deviations.

    x raises t for all 32 weights at once, so where f > 0 their count varies more than binomially: by 0.13 %
    for p = 0.1 and by 0.4 % for p = 8.5 / 256, about as much as a variance over 2^17 calls varies by chance.
    """
    counts = calls(p).view(-1, size, 2**17).sum(1).flatten().long().bincount(minlength=size + 1)
    chances = [math.comb(size, k) * (1 - p) ** k * p ** (size - k) for k in range(size + 1)]
    expected = torch.tensor(chances).double() * counts.sum()
    common = expected >= 10
    seen, meant = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected))
    chi_square = ((seen - meant) ** 2 / meant.clamp_min(1)).sum()
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_heads_batches_seeds_and_offsets_differ() -> None:
    masks = [
        Dropout(torch.tensor([seed, offset]), 0.5).keep(range(2), 2, range(64), range(64)).flatten(0, 1)
        for seed, offset in ((1, 0), (2, 0), (1, 1), (1 + 2**32, 0))
    ]
    agreement = [(a == b).double().mean() for a, b in itertools.combinations(torch.cat(masks), 2)]
    assert max(abs(x - 0.5) for x in agreement) < 0.05


@pytest.mark.parametrize("p", [ALMOST_ONE, 1.0])
@pytest.mark.parametrize("most", [0, lanes.MOST], ids=["tensors", "integers"])
def test_everything_is_dropped(p: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST", most)
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in "qkv")
    out = flash4_torch.attention(q, k, v, dropout_p=p)
    out.sum().backward()
    assert (out == 0).all() and all((x.grad == 0).all() for x in (q, k, v))


def test_next_to_nothing_is_dropped() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in "qkv")
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


@given(st.integers(0, 99), st.tuples(*[st.integers(1, 40)] * 2), st.integers(1, 3), st.data())
def test_a_tile_is_a_part_of_the_mask(seed: int, sizes: tuple[int, int], B: int, data: st.DataObject) -> None:
    rng_state, (Sq, Sk) = torch.tensor([seed, 7]), sizes
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in (B, Sq, Sk)]
    batch, rows, keys = (range(*pair) for pair in ends)
    for first_batch in (0, 1, 0):
        dropout = Dropout(rng_state, 0.3, first_batch)
        tile = dropout.tile((B, 2, Sq, Sk), batch, rows, keys)
        whole = dropout.keep(range(B), 2, range(Sq), range(Sk))
        assert torch.equal(tile, whole[batch.start : batch.stop, :, rows.start : rows.stop][..., keys])


def test_small_masks_are_made_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, made = dropout_module._Masks(), []
    monkeypatch.setattr(dropout_module, "_masks", masks)
    keep = Dropout.keep_all
    monkeypatch.setattr(Dropout, "keep_all", lambda self, *sizes: made.append(sizes) or keep(self, *sizes))
    every = (range(2), range(16), range(16))
    for _ in range(2):
        Dropout(torch.tensor([1, 2]), 0.3).tile((2, 3, 16, 16), *every)
    assert len(made) == 1
    for offset in range(masks.COUNT + 5):
        Dropout(torch.tensor([1, offset]), 0.3).tile((1, 1, 2, 2), range(1), range(2), range(2))
    assert len(masks._masks) == masks.COUNT
    monkeypatch.setattr(masks, "WEIGHTS", 100)
    Dropout(torch.tensor([9, 9]), 0.3).tile((1, 1, 5, 5), range(1), range(5), range(5))
    assert sum(x.numel() for x in masks._masks.values()) == masks._weights <= 100
