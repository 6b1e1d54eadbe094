"""Asynchronous copies against NumPy, under all schedules and with the race checker on.

PTX ISA: Data Movement and Conversion Instructions, asynchronous copy; tensors.
"""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4_torch.emulator.engine import Options, run_ptx
from flash4_torch.emulator.errors import PtxError, UnsupportedInstruction
from flash4_torch.emulator.report import Report
from tensor_map import ELEMENT_TYPES, TensorMap, aligned_bytes, random_bytes, swizzle

LANES = 32
TILE = 16384  # bytes of shared memory for one tile
SCHEDULES = (Options(schedule="eager"), Options(schedule="late"), Options(schedule="fuzz", seed=5))
all_schedules = pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o.schedule)


def kernel(body: str, params: str, arch: str = "sm_100a", declarations: str = "") -> str:
    """A kernel whose thread 0 has set up two mbarriers; parameters are addresses, also of tensor maps."""
    names = params.split(", ")
    declared = ", ".join(f".param .u64 {name}" for name in names)
    loads = "\n".join(f".reg .b64 %{name};\n ld.param.u64 %{name}, [{name}];" for name in names)
    return f"""
.version 8.8
.target {arch}
.address_size 64
.visible .entry k({declared})
{{
    .shared .align 1024 .b8 tile[{TILE}];
    .shared .align 1024 .b8 tile2[{TILE}];
    .shared .align 8 .b64 barriers[2];
    .reg .pred %one, %done;
    .reg .b32 %thread, %lane, %tile, %tile2, %bar, %bar2, %x, %y, %rank, %c<5>;
    .reg .b64 %wide, %p, %q;
    {declarations}
    {loads}
    mov.u32 %thread, %tid.x;
    mov.u32 %lane, %laneid;
    mov.u32 %tile, tile;
    mov.u32 %tile2, tile2;
    mov.u32 %bar, barriers;
    add.u32 %bar2, %bar, 8;
    mov.u32 %rank, %cluster_ctarank;
    setp.eq.u32 %one, %thread, 0;
    @%one mbarrier.init.shared::cta.b64 [%bar], 1;
    @%one mbarrier.init.shared::cta.b64 [%bar2], 1;
    @%one fence.mbarrier_init.release.cluster;
    {CLUSTER_BARRIER}
    {body}
    ret;
}}
"""


CLUSTER_BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
COMMIT_AND_WAIT = "@%one cp.async.bulk.commit_group; @%one cp.async.bulk.wait_group 0;"


def expect(size: int, bar: str = "%bar") -> str:
    return f"@%one mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {size};"


_LABELS = itertools.count()


def wait(bar: str = "%bar", parity: int = 0) -> str:
    label = f"wait{next(_LABELS)}"
    return f"""
    {label}:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [{bar}], {parity};
    @!%done bra {label};
    """


def run(body: str, params: str, *arrays: np.ndarray, declarations: str = "", **options: object) -> Report:
    return run_ptx(kernel(body, params, declarations=declarations), arrays, **options)


def findings(body: str, params: str, *arrays: np.ndarray, **options: object) -> list[str]:
    report = run(body, params, *arrays, check=False, **options)
    return [f"{finding.kind}: {finding.message}" for finding in report.findings]


# --- tensor copies


@st.composite
def boxes(draw: st.DrawFn) -> tuple[TensorMap, np.ndarray, list[int]]:
    """A map, its tensor's bytes and where a copy begins; boxes extend outside on all sides."""
    element = draw(st.sampled_from(sorted(ELEMENT_TYPES)))
    width = 2 if element == "bfloat16" else np.dtype(element).itemsize
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    row_bytes = 16 * draw(st.integers(1, (swizzle or 128) // 16))
    rank = draw(st.integers(1, 5))
    box = [row_bytes // width, *(draw(st.integers(1, limit)) for limit in (9, 4, 3, 2)[: rank - 1])]
    sizes = [draw(st.integers(1, 2 * b + 3)) for b in box]
    strides, extent = [], -(-sizes[0] * width // 16) * 16
    for size in sizes[1:]:
        strides.append(-(-extent // 16) * 16 + 16 * draw(st.integers(0, 2)))
        extent = strides[-1] * size
    tensor = random_bytes(extent, seed=rank)
    start = [draw(st.integers(-b, s + 1)) for b, s in zip(box, sizes, strict=True)]
    start[0] = start[0] * width // 16 * 16 // width
    map_ = TensorMap(tensor.ctypes.data, element, tuple(sizes), tuple(strides), tuple(box), swizzle)
    return map_, tensor, start


def coordinates(start: list[int]) -> tuple[str, str]:
    """Instructions that put the coordinates into registers, and the list of these registers."""
    names = [f"%c{d}" for d in range(len(start))]
    return "".join(f"mov.b32 {n}, {s};\n" for n, s in zip(names, start, strict=True)), ", ".join(names)


@all_schedules
@settings(max_examples=25)
@given(case=boxes())
def test_a_box_is_loaded(options: Options, case: tuple[TensorMap, np.ndarray, list[int]]) -> None:
    """Elements outside the tensor are zeros, and count among the bytes that the barrier expects."""
    map_, tensor, start = case
    moves, names = coordinates(start)
    out = aligned_bytes(map_.tile_bytes)
    rank = len(start)
    run(
        f"""
        {moves}
        {expect(map_.box_bytes)}
        @%one cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%tile], [%map, {{{names}}}], [%bar];
        {wait()}
        @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], {map_.tile_bytes};
        {COMMIT_AND_WAIT}
        """,
        "map, tensor, out",
        map_.encode(),
        tensor,
        out,
        options=options,
    )
    expected = out.copy()  # narrow rows leave gaps
    for in_tile, in_tensor in map_.places(start):
        width = map_.element_bytes
        inside = in_tensor is not None
        expected[in_tile : in_tile + width] = tensor[in_tensor : in_tensor + width] if inside else 0
    np.testing.assert_array_equal(out, expected)


@all_schedules
@settings(max_examples=25)
@given(case=boxes())
def test_a_box_is_stored(options: Options, case: tuple[TensorMap, np.ndarray, list[int]]) -> None:
    """Rows outside the tensor are not written; rows inside are, in whole 16-byte chunks, as on an H200."""
    map_, tensor, start = case
    start = [max(s, 0) for s in start]
    moves, names = coordinates(start)
    source = random_bytes(map_.tile_bytes, seed=9)
    expected = tensor.copy()
    for in_tile, in_tensor in map_.places(start):
        if in_tensor is not None:
            chunk, stored = in_tile // 16 * 16, in_tensor // 16 * 16
            expected[stored : stored + 16] = source[chunk : chunk + 16]
    run(
        f"""
        {moves}
        {expect(map_.tile_bytes)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], {map_.tile_bytes}, [%bar];
        {wait()}
        @%one cp.async.bulk.tensor.{len(start)}d.global.shared::cta.tile.bulk_group
            [%map, {{{names}}}], [%tile];
        {COMMIT_AND_WAIT}
        """,
        "map, tensor, source",
        map_.encode(),
        tensor,
        source,
        options=options,
    )
    np.testing.assert_array_equal(tensor, expected)


REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
REDUCED = [
    *(("add", t) for t in ("uint32", "int32", "uint64", "float16", "float32")),
    *((op, t) for op in ("min", "max") for t in ("uint32", "int32", "float16")),
    *((op, "uint32") for op in ("and", "or")),
]


@pytest.mark.parametrize("operation, element", REDUCED)
def test_a_box_is_reduced(operation: str, element: str) -> None:
    kind = np.dtype(element)
    rng = np.random.default_rng(3)
    values = rng.integers(0, 1000, (2, 4, 8)).astype(kind)
    tensor, source = aligned_bytes(values[0].nbytes).view(kind).reshape(4, 8), aligned_bytes(values[0].nbytes)
    tensor[:] = values[0]
    source[:] = values[1].view(np.uint8).ravel()
    map_ = TensorMap(tensor.ctypes.data, element, (8, 4), (8 * kind.itemsize,), (8, 4))
    run(
        f"""
        {expect(source.nbytes)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], {source.nbytes}, [%bar];
        {wait()}
        @%one cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group
            [%map, {{0, 0}}], [%tile];
        {COMMIT_AND_WAIT}
        """,
        "map, tensor, source",
        map_.encode(),
        tensor,
        source,
    )
    np.testing.assert_array_equal(tensor, REDUCTIONS[operation](values[0], values[1]))


def small_map(tensor: np.ndarray, swizzle_row: int = 0) -> TensorMap:
    """A map of 8 rows of 128 bytes."""
    return TensorMap(tensor.ctypes.data, "uint8", (128, 8), (128,), (128, 8), swizzle_row)


LOAD = """@%one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers}
    [{tile}], [%map, {{0, 0}}], [{bar}]{more};"""


def load(modifiers: str = "", more: str = "", tile: str = "%tile", bar: str = "%bar") -> str:
    return LOAD.format(modifiers=modifiers, more=more, tile=tile, bar=bar)


STORE = "@%one cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{{}}}], [%tile];"


def dump(size: int, to: str = "%p", tile: str = "%tile") -> str:
    """Writes a tile to the CTA's place in `out`."""
    return f"""
    mad.wide.u32 %p, %rank, {size}, %out;
    @%one cp.async.bulk.global.shared::cta.bulk_group [{to}], [{tile}], {size};
    {COMMIT_AND_WAIT}
    """


@all_schedules
def test_a_copy_to_several_ctas_signals_each(options: Options) -> None:
    tensor, out = random_bytes(1024, seed=1), aligned_bytes(4 * 1024).reshape(4, 1024)
    run(
        f"""
        setp.eq.u32 %cluster, %rank, 1;
        mov.b16 %ctas, 13;
        {expect(1024)}
        {CLUSTER_BARRIER}
        and.pred %lead, %one, %cluster;
        {load(".multicast::cluster", ", %ctas").replace("@%one", "@%lead")}
        setp.eq.u32 %cluster, %rank, 1;
        @%cluster bra skip;
        {wait()}
        {dump(1024)}
        skip:
        @!%cluster bra end;
        @%one mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%bar], 1024;
        end:
        {CLUSTER_BARRIER}
        """,
        "map, tensor, out",
        small_map(tensor).encode(),
        tensor,
        out,
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
        options=options,
        declarations=".reg .pred %cluster, %lead; .reg .b16 %ctas;",
    )
    np.testing.assert_array_equal(out, np.where(np.array([[1], [0], [1], [1]]), tensor, 0))


@all_schedules
def test_a_pair_of_ctas_signals_one_barrier(options: Options) -> None:
    """.cta_group::2: both CTAs load for themselves and signal the even one, which alone waits."""
    tensor, out = random_bytes(1024, seed=2), aligned_bytes(2 * 1024).reshape(2, 1024)
    run(
        f"""
        setp.eq.u32 %even, %rank, 0;
        and.pred %lead, %one, %even;
        {expect(2048).replace("@%one", "@%lead")}
        {CLUSTER_BARRIER}
        and.b32 %x, %bar, 0xFEFFFFFF;
        {load(".cta_group::2", bar="%x")}
        @!%even bra meet;
        {wait()}
        meet:
        {CLUSTER_BARRIER}
        {dump(1024)}
        {CLUSTER_BARRIER}
        """,
        "map, tensor, out",
        small_map(tensor).encode(),
        tensor,
        out,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        options=options,
        declarations=".reg .pred %even, %lead;",
    )
    np.testing.assert_array_equal(out, [tensor, tensor])


def test_only_a_pair_may_signal_another_cta() -> None:
    tensor = random_bytes(1024, seed=2)
    found = findings(
        f"xor.b32 %x, %bar, 0x01000000; {load(bar='%x')}",
        "map, tensor",
        small_map(tensor).encode(),
        tensor,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )
    assert re.match(r"mbarrier: a copy to CTA \d cannot signal CTA \d", found[0])


@pytest.mark.parametrize(
    "change, body, kind",
    [
        ({"address": 8}, load(), "tensor-map"),
        ({"box": (8, 8)}, load(), "tensor-map"),
        ({"swizzle": 64}, load(), "tensor-map"),
        ({"fill_nan": True}, load(), "tensor-map"),
        ({"swizzle": 64, "atom": 32}, load(), "unsupported"),
        ({"sizes": (128, 9)}, load().replace("0, 0", "0, 1"), "out-of-bounds"),
        ({}, load(tile="%tile+16"), "misaligned"),
        ({}, load().replace("0, 0", "8, 0"), "misaligned"),
        ({}, STORE.format("0, -1"), "out-of-bounds"),
        ({}, load(tile=f"%bar+{-8 % 128}"), "out-of-bounds"),
        ({}, load().replace("0, 0", "0").replace("2d", "1d"), "tensor-map"),
        ({}, load(bar="%bar2+8"), "out-of-bounds"),
        ({}, load(bar="%tile2"), "mbarrier"),
    ],
)
def test_wrong_tensor_copies_are_refused(change: dict, body: str, kind: str) -> None:
    tensor = random_bytes(1024, seed=2)
    fields = {**small_map(tensor).__dict__, **change}
    if "address" in change:
        fields["address"] = tensor.ctypes.data + 8
    body = f"{expect(1152)} {body}"
    (found,) = findings(body, "map, tensor", TensorMap(**fields).encode(), tensor)
    assert found.startswith(kind), found


@pytest.mark.parametrize(
    "instruction",
    [
        load().replace(".tile.", ".im2col."),
        load().replace(".tile.", ".tile::gather4."),
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.frob.bulk_group [%map, {0, 0}], [%tile];",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%map], [%tile], 16, 3;",
    ],
)
def test_what_the_engine_lacks_is_refused(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run(instruction, "map", aligned_bytes(128))


@pytest.mark.parametrize("element, nan", [("float16", 0x7FF7), ("bfloat16", 0x7FF7), ("float32", 0x7FF77FF7)])
def test_elements_outside_may_read_as_nan(element: str, nan: int) -> None:
    """The pattern is the one that an H200 gives."""
    tensor, kind = random_bytes(1024, seed=5), np.uint32 if nan > 0xFFFF else np.uint16
    map_ = TensorMap(tensor.ctypes.data, element, (8, 4), (64,), (16, 8), fill_nan=True)
    out = aligned_bytes(map_.box_bytes)
    run(
        f"{expect(out.nbytes)} {load()} {wait()} {dump(out.nbytes)}",
        "map, tensor, out",
        map_.encode(),
        tensor,
        out,
    )
    loaded = out.view(kind).reshape(8, 16)
    np.testing.assert_array_equal(
        loaded[:4, :8], tensor.view(kind).reshape(-1, 64 // kind().itemsize)[:4, :8]
    )
    assert (loaded[4:] == nan).all() and (loaded[:, 8:] == nan).all()


def test_a_map_of_tf32_rounds() -> None:
    """Values are rounded to nearest, as on an H200; ties are not tested."""
    tensor, out = random_bytes(1024, seed=7), aligned_bytes(1024)
    map_ = TensorMap(tensor.ctypes.data, "float32", (32, 8), (128,), (32, 8)).encode()
    map_.view(np.uint32)[2] |= 1 << 16
    run(f"{expect(1024)} {load()} {wait()} {dump(1024)}", "map, tensor, out", map_, tensor, out)
    bits = tensor.view(np.uint32)
    finite = bits >> 23 & 0xFF != 0xFF
    np.testing.assert_array_equal(out.view(np.uint32)[finite], (bits + 0x1000 & ~np.uint32(0x1FFF))[finite])


def test_swizzle_of_32_byte_chunks() -> None:
    """The swizzle as CuTe writes it: Swizzle<2, 5, 2> of bytes."""
    tensor, out = random_bytes(1024, seed=5), aligned_bytes(1024)
    map_ = TensorMap(tensor.ctypes.data, "uint8", (128, 8), (128,), (128, 8), 128, atom=32)
    run(f"{expect(1024)} {load()} {wait()} {dump(1024)}", "map, tensor, out", map_.encode(), tensor, out)
    np.testing.assert_array_equal(out, tensor[[i ^ (i >> 7 & 3) << 5 for i in range(1024)]])


def test_fields_of_a_map_are_replaced_in_shared_memory() -> None:
    """A map made by tensormap.replace is published and used like one that the host encodes."""
    tensor, out, made = random_bytes(4096, seed=4), aligned_bytes(512), aligned_bytes(128)
    target = TensorMap(tensor.ctypes.data, "float16", (60, 30), (128,), (32, 8), 64)
    blank = TensorMap(0, "uint8", (1, 1), (16,), (1, 1)).encode()
    prefix = "tensormap.replace.tile"
    fields = [
        f"{prefix}.global_address.shared::cta.b1024.b64 [%tile], %tensor;",
        f"{prefix}.rank.shared::cta.b1024.b32 [%tile], 1;",
        f"{prefix}.elemtype.shared::cta.b1024.b32 [%tile], 6;",
        f"{prefix}.swizzle_mode.shared::cta.b1024.b32 [%tile], 2;",
        f"{prefix}.global_stride.shared::cta.b1024.b64 [%tile], 0, 128;",
        *(f"{prefix}.global_dim.shared::cta.b1024.b32 [%tile], {d}, {n};" for d, n in enumerate((60, 30))),
        *(f"{prefix}.box_dim.shared::cta.b1024.b32 [%tile], {d}, {n};" for d, n in enumerate((32, 8))),
    ]
    run(
        f"""
        {expect(128)}
        @%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%tile], [%blank], 128, [%bar];
        {wait()}
        {" ".join("@%one " + field for field in fields)}
        bar.warp.sync -1;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%made], [%tile], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%made], 128;
        prefetch.tensormap [%made];
        {expect(512, "%bar2")}
        {load(tile="%tile2", bar="%bar2").replace("%map", "%made")}
        {wait("%bar2")}
        {dump(512, tile="%tile2")}
        """,
        "blank, made, tensor, out",
        blank,
        made,
        tensor,
        out,
    )
    np.testing.assert_array_equal(made[8:], target.encode()[8:])  # on a GPU the tensor is elsewhere
    rows = tensor.reshape(32, 128)[:8, :64].ravel()
    np.testing.assert_array_equal(out, [rows[swizzle(i, 64)] for i in range(512)])


# --- bulk copies


@all_schedules
def test_bulk_copies_to_several_ctas_and_between_them(options: Options) -> None:
    """Global memory to both CTAs, and then from each CTA to the other."""
    source, out = random_bytes(512, seed=6), aligned_bytes(1024).reshape(2, 512)
    run(
        f"""
        setp.eq.u32 %even, %rank, 0;
        and.pred %lead, %one, %even;
        mov.b16 %ctas, 3;
        {expect(512)}
        {expect(256, "%bar2")}
        {CLUSTER_BARRIER}
        @%lead cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%tile], [%source], 512, [%bar], %ctas;
        {wait()}
        xor.b32 %peer, %rank, 1;
        mapa.shared::cluster.u32 %x, %tile2, %peer;
        mapa.shared::cluster.u32 %y, %bar2, %peer;
        @%one cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%x], [%tile+256], 256, [%y];
        {wait("%bar2")}
        {CLUSTER_BARRIER}
        mad.wide.u32 %p, %rank, 512, %out;
        @%one cp.async.bulk.global.shared::cta.bulk_group [%p], [%tile], 256;
        @%one cp.async.bulk.global.shared::cta.bulk_group [%p+256], [%tile2], 256;
        {COMMIT_AND_WAIT}
        {CLUSTER_BARRIER}
        """,
        "source, out",
        source,
        out,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        options=options,
        declarations=".reg .pred %even, %lead; .reg .b16 %ctas; .reg .b32 %peer;",
    )
    np.testing.assert_array_equal(out, [source, source])


BULK_REDUCED = [
    *(("add", t, "") for t in ("u32", "s32", "u64", "f32", "f64")),
    ("add", "f16", ".noftz"),
    *((op, t, "") for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16")),
    *((op, t, "") for op in ("and", "or", "xor") for t in ("b32", "b64")),
]
ALL_REDUCTIONS = {**REDUCTIONS, "xor": np.bitwise_xor}


@pytest.mark.parametrize("operation, element, noftz", BULK_REDUCED)
def test_bulk_reductions_to_global_memory(operation: str, element: str, noftz: str) -> None:
    kind = np.dtype({"f": "float", "u": "uint", "b": "uint", "s": "int"}[element[0]] + element[1:])
    values = np.random.default_rng(3).integers(0, 1000, (2, 32)).astype(kind)
    source, out = aligned_bytes(values[0].nbytes), aligned_bytes(values[0].nbytes).view(kind)
    source[:], out[:] = values[0].view(np.uint8), values[1]
    run(
        f"""
        {expect(source.nbytes)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], {source.nbytes}, [%bar];
        {wait()}
        @%one cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}{noftz}.{element}
            [%out], [%tile], {source.nbytes};
        {COMMIT_AND_WAIT}
        """,
        "source, out",
        source,
        out,
    )
    np.testing.assert_array_equal(out, ALL_REDUCTIONS[operation](values[1], values[0]))


def test_bulk_reductions_in_the_cluster() -> None:
    source, out = np.arange(64, dtype=np.uint32), aligned_bytes(256)
    run(
        f"""
        {expect(512)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], 256, [%bar];
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile2], [%source], 256, [%bar];
        {wait()}
        {expect(256, "%bar2")}
        @%one cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
            [%tile2], [%tile], 256, [%bar2];
        {wait("%bar2")}
        {dump(256, tile="%tile2")}
        """,
        "source, out",
        source_bytes := aligned_copy(source),
        out,
    )
    np.testing.assert_array_equal(out.view(np.uint32), 2 * source_bytes.view(np.uint32))


def aligned_copy(array: np.ndarray) -> np.ndarray:
    copy = aligned_bytes(array.nbytes)
    copy[:] = array.view(np.uint8).ravel()
    return copy


@pytest.mark.parametrize(
    "body, kind",
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], %x;", "misaligned"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile+8], 16;", "misaligned"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%out+8], [%tile], 16;", "misaligned"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], 272;", "out-of-bounds"),
    ],
)
def test_wrong_bulk_copies_are_refused(body: str, kind: str) -> None:
    (found,) = findings(f"mov.u32 %x, 24; @%one {body}", "out", aligned_bytes(256))
    assert found.startswith(kind), found


STORE_TWICE = """
    st.shared.u32 [%mine], %lane;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], 128;
    @%one cp.async.bulk.commit_group;
    {wait}
    bar.warp.sync -1;
    st.shared.u32 [%mine], 7;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    @%one cp.async.bulk.global.shared::cta.bulk_group [%out+128], [%tile], 128;
    @%one cp.async.bulk.commit_group;
    @%one cp.async.bulk.wait_group 0;
"""


def store_twice(wait_group: str, options: Options) -> tuple[np.ndarray, list[str]]:
    out = aligned_bytes(256)
    found = findings(
        "mad.lo.u32 %mine, %lane, 4, %tile;" + STORE_TWICE.format(wait=wait_group),
        "out",
        out,
        options=options,
        declarations=".reg .b32 %mine;",
    )
    return out.view(np.uint32).reshape(2, 32), [f.split(":")[0] for f in found]


@all_schedules
@pytest.mark.parametrize("wait_group", ["wait_group.read 0", "wait_group 0"])
def test_a_waited_store_leaves_its_source_free(wait_group: str, options: Options) -> None:
    out, found = store_twice(f"@%one cp.async.bulk.{wait_group};", options)
    assert not found
    np.testing.assert_array_equal(out, [np.arange(32), np.full(32, 7)])


@all_schedules
@pytest.mark.parametrize("wait_group", ["", "@%one cp.async.bulk.wait_group.read 1;"])
def test_a_store_that_was_not_waited_for_races(wait_group: str, options: Options) -> None:
    _, found = store_twice(wait_group, options)
    assert "race" in found


def test_a_late_store_reads_what_is_there_then() -> None:
    out, _ = store_twice("", Options(schedule="late"))
    np.testing.assert_array_equal(out, np.full((2, 32), 7))


@all_schedules
def test_a_store_that_all_lanes_issue_is_done_once_for_all(options: Options) -> None:
    """Every lane may wait for the store, here the last one, which then overwrites the tile."""
    source, tensor = random_bytes(1024, seed=11), aligned_bytes(1024)
    report = run(
        f"""
        {expect(1024)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], 1024, [%bar];
        {wait()}
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{0, 0}}], [%tile];
        cp.async.bulk.commit_group;
        setp.eq.u32 %last, %lane, 31;
        @%last cp.async.bulk.wait_group.read 0;
        @%last st.shared.u32 [%tile], 7;
        cp.async.bulk.wait_group 0;
        """,
        "map, tensor, source",
        small_map(tensor).encode(),
        tensor,
        source,
        options=options,
        declarations=".reg .pred %last;",
    )
    np.testing.assert_array_equal(tensor, source)
    assert report.counters.async_bytes == 2 * 1024


@all_schedules
def test_lanes_that_store_to_different_boxes_all_do(options: Options) -> None:
    source, tensor = random_bytes(128, seed=12), aligned_bytes(128 * LANES)
    map_ = TensorMap(tensor.ctypes.data, "uint8", (128, LANES), (128,), (128, 1), 0)
    run(
        f"""
        {expect(128)}
        @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%tile], [%source], 128, [%bar];
        {wait()}
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{0, %lane}}], [%tile];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """,
        "map, tensor, source",
        map_.encode(),
        tensor,
        source,
        options=options,
    )
    np.testing.assert_array_equal(tensor.reshape(LANES, 128), np.tile(source, (LANES, 1)))


# --- cp.async


@all_schedules
@pytest.mark.parametrize("size, cache", [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
@pytest.mark.parametrize("end", ["wait_group 0", "wait_all", "arrive.noinc", "arrive"])
def test_lanes_copy_asynchronously(size: int, cache: str, end: str, options: Options) -> None:
    """The first bytes of each piece come from the source, the rest are zeros; one lane ignores its source."""
    source, out = random_bytes(LANES * size, seed=size), aligned_bytes(LANES * size)
    arrives = end.startswith("arrive")
    finish = f"cp.async.commit_group; cp.async.{end};"
    if arrives:
        finish = f"cp.async.mbarrier.{end}.shared.b64 [%bar];"
    start = ""
    if end == "arrive":  # raises the expected count by what it adds
        finish += "@%one mbarrier.arrive.shared.b64 _, [%bar];"
    elif end == "arrive.noinc":
        start = "@%one mbarrier.inval.shared.b64 [%bar]; @%one mbarrier.init.shared.b64 [%bar], 32;"
    run(
        f"""
        {start}
        bar.warp.sync -1;
        mad.wide.u32 %p, %lane, {size}, %source;
        mad.lo.u32 %x, %lane, {size}, %tile;
        sub.u32 %y, 32, %lane;
        min.u32 %y, %y, {size};
        setp.eq.u32 %ignored, %lane, 3;
        @!%ignored cp.async.{cache}.shared.global.L2::128B [%x], [%p], {size}, %y;
        @%ignored cp.async.{cache}.shared.global [%x], [%p], {size}, %ignored;
        {finish}
        {wait() if arrives else "bar.warp.sync -1;"}
        fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], {LANES * size};
        {COMMIT_AND_WAIT}
        """,
        "source, out",
        source,
        out,
        options=options,
        declarations=".reg .pred %ignored;",
    )
    expected = source.reshape(LANES, size).copy()
    for lane in range(LANES):
        expected[lane, min(32 - lane, size) if lane != 3 else 0 :] = 0
    np.testing.assert_array_equal(out.reshape(LANES, size), expected)


def copy_some_bytes(size: int, reads: str) -> str:
    """A warp fills the tile with `old`, copies a piece of `source` per lane over it, and stores the tile."""
    return f"""
        mad.wide.u32 %p, %lane, {2 * size}, %old;
        mad.lo.u32 %x, %lane, {2 * size}, %tile;
        cp.async.ca.shared.global [%x], [%p], {size};
        cp.async.ca.shared.global [%x+{size}], [%p+{size}], {size};
        cp.async.wait_all;
        bar.warp.sync -1;
        mad.wide.u32 %p, %lane, 4, %places;
        ld.global.u32 %x, [%p];
        mad.lo.u32 %x, %x, {size}, %tile;
        mad.wide.u32 %p, %lane, 4, %reads;
        ld.global.u32 %y, [%p];
        setp.eq.u32 %none, %y, 0;
        mad.wide.u32 %p, %lane, {size}, %source;
        selp.b64 %p, -{size}, %p, %none;
        cp.async.ca.shared.global [%x], [%p], {size}, {reads};
        cp.async.wait_all;
        fence.proxy.async.shared::cta;
        bar.warp.sync -1;
        @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], {2 * LANES * size};
        {COMMIT_AND_WAIT}
        """


@settings(max_examples=20)
@given(st.sampled_from([4, 8, 16]), st.booleans(), st.data(), st.sampled_from(SCHEDULES))
def test_bytes_that_are_not_read_are_zeros(
    size: int, immediate: bool, data: st.DataObject, options: Options
) -> None:
    """Each lane reads up to `size` bytes; one that reads none may name any address as its source."""
    count = 1 if immediate else LANES
    drawn = data.draw(st.lists(st.integers(0, size), min_size=count, max_size=count), label="reads")
    reads = np.resize(np.array(drawn, np.uint32), LANES)
    places = np.array(data.draw(st.permutations(range(2 * LANES)), label="places")[:LANES], np.uint32)
    source, old = random_bytes(LANES * size, seed=size), random_bytes(2 * LANES * size, seed=size + 1)
    out = aligned_bytes(old.size)
    run(
        copy_some_bytes(size, str(drawn[0]) if immediate else "%y"),
        "source, old, reads, places, out",
        source,
        old,
        reads,
        places,
        out,
        options=options,
        declarations=".reg .pred %none;",
    )
    expected = old.reshape(-1, size).copy()
    copied = np.arange(size) < reads[:, None]
    expected[places] = np.where(copied, source.reshape(-1, size), 0)
    np.testing.assert_array_equal(out.reshape(-1, size), expected)


@pytest.mark.parametrize(
    ("instruction", "says"),
    [
        ("cp.async.cg.shared.global [%tile], [%out], 8", "8 bytes; possible: 16"),
        ("cp.async.ca.shared.global [%tile], [%out], 12", "12 bytes; possible: 4, 8, 16"),
        ("cp.async.ca.shared.global [%tile], [%out], 32", "32 bytes; possible: 4, 8, 16"),
        ("cp.async.shared.global [%tile], [%out], 16", r"one of \.ca, \.cg"),
        ("cp.async.ca.cg.shared.global [%tile], [%out], 16", r"one of \.ca, \.cg"),
        ("cp.async.ca.global [%tile], [%out], 16", r"one of \.shared, \.shared::cta"),
        ("cp.async.ca.shared [%tile], [%out], 16", r"one of \.global"),
        ("cp.async.ca.shared.global [%tile], [%out]", "2 operands"),
        ("cp.async.wait_group %x", "operand 1 must be an integer"),
        ("cp.async.wait_group -1", "an integer from 0"),
        ("cp.async.wait_all 0", "1 operands"),
    ],
)
def test_malformed_forms_of_cp_async(instruction: str, says: str) -> None:
    with pytest.raises(PtxError, match=says):
        run(f"{instruction};", "out", aligned_bytes(64))


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.ca.shared::cluster.global [%tile], [%out], 16",
        "cp.async.wait_group.read 0",
        "cp.async.commit_group.shared",
    ],
)
def test_modifiers_that_cp_async_lacks(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="modifier"):
        run(f"{instruction};", "out", aligned_bytes(64))


@pytest.mark.parametrize(
    ("operands", "kind"),
    [
        ("[%tile], [%out], 16, 17", "unsupported"),
        ("[%tile], [%out+56], 16, 8", "misaligned"),
        ("[%tile+8], [%out], 16", "misaligned"),
        ("[%tile], [%out+64], 16", "out-of-bounds"),
        ("[%tile], [%out+64], 16, 1", "out-of-bounds"),
        ("[%tile+65536], [%out], 16", "out-of-bounds"),
    ],
)
def test_wrong_copies_of_cp_async_are_found(operands: str, kind: str) -> None:
    body = f"cp.async.ca.shared.global {operands}; cp.async.wait_all;"
    report = run(body, "out", aligned_bytes(64), check=False)
    assert [finding.kind for finding in report.findings] == [kind]


PIPELINE = """
    mad.wide.u32 %p, %lane, 4, %source;
    mad.lo.u32 %x, %lane, 4, %tile;
    cp.async.ca.shared.global [%x], [%p], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%x+128], [%p+128], 4;
    cp.async.commit_group;
    cp.async.wait_group {pending};
    ld.shared.u32 %y, [%x];
    mad.wide.u32 %p, %lane, 4, %out;
    st.global.u32 [%p], %y;
    cp.async.wait_all;
"""


@all_schedules
def test_older_groups_of_cp_async_are_waited_for(options: Options) -> None:
    source, out = random_bytes(256, seed=8), aligned_bytes(128)
    run(PIPELINE.format(pending=1), "source, out", source, out, options=options)
    np.testing.assert_array_equal(out, source[:128])


@all_schedules
def test_newer_groups_of_cp_async_are_not(options: Options) -> None:
    source, out = random_bytes(256, seed=8), aligned_bytes(128)
    found = findings(PIPELINE.format(pending=2), "source, out", source, out, options=options)
    assert [f.split(":")[0] for f in found] == ["race"]


# --- st.async, red.async


@all_schedules
@pytest.mark.parametrize(
    "instruction, size, expected",
    [
        (
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%x], %lane, [%y];",
            4,
            lambda i: [i],
        ),
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%x], {%lane, 1, 2, %lane}, [%y];",
            16,
            lambda i: [i, 1, 2, i],
        ),
        (
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
            "[%x], %lane, [%y];",
            4,
            lambda i: [i + 5],
        ),
    ],
    ids=["store", "vector", "add"],
)
def test_lanes_write_to_another_cta(
    instruction: str, size: int, expected: functools.partial, options: Options
) -> None:
    out = aligned_bytes(2 * LANES * size)
    run(
        f"""
        mad.lo.u32 %x, %lane, {size}, %tile;
        st.shared.u32 [%x], 5;
        {expect(LANES * size)}
        {CLUSTER_BARRIER}
        xor.b32 %peer, %rank, 1;
        mapa.shared::cluster.u32 %x, %x, %peer;
        mapa.shared::cluster.u32 %y, %bar, %peer;
        {instruction}
        {wait()}
        fence.proxy.async.shared::cta;
        {dump(LANES * size)}
        {CLUSTER_BARRIER}
        """,
        "out",
        out,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        options=options,
        declarations=".reg .b32 %peer;",
    )
    rows = [expected(lane) for lane in range(LANES)]
    np.testing.assert_array_equal(out.view(np.uint32).reshape(2, LANES, -1), [rows, rows])
