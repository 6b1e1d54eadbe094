"""The decode kernel as ptxas compiles it: nothing spills."""

from __future__ import annotations

import pytest

import compiled_files
import cubin
from everything import one_of
from flash4_torch.compile import Key
from flash4_torch.configs import decode
from flash4_torch.configs.decode import DecodeForm
from flash4_torch.configs.types import Features

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ENTRY = "flash4_torch.kernels.decode.launch:compile_decode"
BAND = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True, "large_softcap": True}
HEADS = ((256, 256), (128, 128), (64, 64), (192, 128), (96, 96), (8, 256))
USES: tuple[dict[str, object], ...] = ({**SOFTCAP, **BAND, "sinks": "float32"}, {"right": True}, {})
FORMS = (
    DecodeForm(paged=True, cluster=8, ragged=True, lengths=True, parts=True, runs=True),
    DecodeForm(paged=False, cluster=4, ragged=False, lengths=False),
    DecodeForm(paged=True, cluster=1, ragged=True, lengths=True),
    DecodeForm(paged=False, cluster=1, ragged=False, lengths=True),
    DecodeForm(paged=True, cluster=8, ragged=True, lengths=True, cache_dtype=decode.FP8, parts=True),
    DecodeForm(paged=True, cluster=1, ragged=True, lengths=True, cache_dtype=decode.FP8, runs=True),
    DecodeForm(paged=False, cluster=1, ragged=True, lengths=True, cache_dtype=decode.FP8),
    DecodeForm(paged=True, cluster=1, ragged=True, lengths=True, parts=True, groups=True, runs=True),
    DecodeForm(
        paged=True, cluster=1, ragged=True, lengths=True, cache_dtype=decode.FP8, parts=True, groups=True
    ),
)
KEYS = [
    Key(ENTRY, (Features(("bfloat16", "float16")[i % 2], *heads)._replace(**uses), rows, form), arch)
    for form in FORMS
    for i, heads in enumerate(HEADS)
    for uses in USES
    for rows in decode.rows_of(Features("bfloat16", *heads), form)[::-1]
    for arch in ("sm_90a", "sm_100a")
    if not decode.limits(Features("bfloat16", *heads), form)
]
GPUS = (
    ("sm_80", decode.AMPERE),
    ("sm_86", decode.GA102),
    ("sm_89", decode.ADA),
    ("sm_120a", decode.ADA),
)
KEYS_SM80 = [
    Key(ENTRY, (features, rows, own), arch)
    for form in FORMS
    if form.cluster == 1
    for i, heads in enumerate(HEADS)
    for uses in USES
    for features in [Features(("bfloat16", "float16")[i % 2], *heads)._replace(**uses)]
    for arch, gpu in GPUS
    for parts in {True, form.groups}
    for own in [form._replace(parts=parts, gpu=gpu)]
    for rows in decode.rows_of(features, own)
    if not decode.limits(features, own)
]
KEYS_WGMMA = [
    Key(ENTRY, (features, rows, own), "sm_90a")
    for form in FORMS
    if not form.cache_dtype
    for i, heads in enumerate(HEADS)
    for uses in USES
    for features in [Features(("bfloat16", "float16")[i % 2], *heads)._replace(**uses)]
    for rows in decode.wgmma_rows(features, form)
    for has_many in (False, True)[: rows // decode.WARPGROUP_ROWS]
    for own in [decode.with_blocks(features, form._replace(wgmma=True), rows, has_many)]
]
KEYS_IN_GROUPS = [
    key._replace(static=(features, rows, decode.with_blocks(features, form._replace(cluster=cluster), rows)))
    for key in KEYS_WGMMA
    for features, rows, form in [key.static]
    if form.groups
    for cluster in decode.group_clusters(features, form, rows)[::-1]
]
KEYS_WITH_MORE = [
    Key(ENTRY, (features, 16, own), arch)
    for form in FORMS
    for i, heads in enumerate(HEADS)
    for uses in USES
    for features in [Features(("bfloat16", "float16")[i % 2], *heads)._replace(**uses)]
    for own in [decode.with_blocks(features, form, 16)]
    for arch in ("sm_90a", "sm_100a")
    if own.keys > decode.KEYS and not decode.limits(features, own)
]
KEYS_FEW = [
    key._replace(static=(features, rows, form._replace(few_rows=True)))
    for key in [*KEYS, *KEYS_SM80, *KEYS_WITH_MORE]
    for features, rows, form in [key.static]
    if rows == decode.MMA_ROWS
]
GROUPS = 6
"""Groups of wgmmas in the code: S of the first block, S and PV of masked ones and of others, the last PV."""
GROUPS_OF_SPLITS = GROUPS + 2
"""Those of several splits: S and PV of a block with which one begins, too."""
GROUPS_OF_MERGES = GROUPS_OF_SPLITS + 2
"""Those where splits are merged in registers: S and PV of the next block, too, under which that is done."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, cubin.Code]:
    chosen = [
        *one_of(len(KEYS), KEYS[::-1]),
        *one_of(263, KEYS_WGMMA),
        *one_of(131, KEYS_IN_GROUPS),
        *one_of(160, KEYS_WITH_MORE),
        *one_of(1101, KEYS_FEW),
        *one_of(1001, KEYS_SM80),
    ]
    return compiled_files.codes(chosen, tmp_path_factory)


def test_nothing_spills(compiled: dict[Key, cubin.Code]) -> None:
    spilling = {key: code for key, code in compiled.items() if code.spills or code.stack}
    assert not spilling, "\n".join(map(str, spilling.items()))


def test_wgmmas_stay_in_flight(compiled: dict[Key, cubin.Code]) -> None:
    """Groups are waited for, not wgmmas one by one, as where ptxas serialises them."""
    by_wgmma = {key: code for key, code in compiled.items() if code.wgmmas}
    assert by_wgmma
    waiting = {}
    for key, code in by_wgmma.items():
        _, _, form = key.static
        of_splits = GROUPS_OF_MERGES if form.group_in_regs else GROUPS_OF_SPLITS
        if code.signalled > (of_splits if form.groups else GROUPS):
            waiting[key] = code
    assert not waiting, "\n".join(map(str, waiting.items()))
