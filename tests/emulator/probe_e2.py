import sys
import numpy as np
sys.path[:0] = ["tests/emulator", "."]
import on_gpu
on_gpu.pytest_configure()
from tensor_map import TensorMap, aligned_bytes, random_bytes
import test_tma as t
def hexw(a): return [hex(int(x)) for x in a.view(np.uint32)[:32]]
def attempt(name, f):
    try: f()
    except BaseException as e: print(name, "FAILED", str(e)[:150], flush=True)
def fields():
    base = TensorMap(0x1000, "uint8", (1,1),(16,),(16,1)).encode()
    for inst, label in [
        *((f"elemtype.global.b1024.b32 [%map], {v};", f"elemtype {v}") for v in range(13)),
        *((f"swizzle_mode.global.b1024.b32 [%map], {v};", f"swizzle {v}") for v in range(4)),
        *((f"interleave_layout.global.b1024.b32 [%map], {v};", f"interleave {v}") for v in range(3)),
        *((f"fill_mode.global.b1024.b32 [%map], {v};", f"fill {v}") for v in range(2)),
        *((f"element_stride.global.b1024.b32 [%map], {d}, {v};", f"estride {d} {v}") for d in range(5) for v in (1,2,7,8)),
        *((f"global_stride.global.b1024.b64 [%map], {d}, 0x2345678901230;", f"gstride {d}") for d in range(4)),
        *((f"global_dim.global.b1024.b32 [%map], {d}, 100;", f"gdim {d}") for d in range(5)),
        *((f"box_dim.global.b1024.b32 [%map], {d}, {v};", f"box {d} {v}") for d in range(5) for v in (7,256)),
        *((f"rank.global.b1024.b32 [%map], {v};", f"rank {v}") for v in range(5)),
        ("global_address.global.b1024.b64 [%map], 0x123456789abcde0;", "address"),
    ]:
        def go():
            m = base.copy()
            t.run(f"@%one tensormap.replace.tile.{inst}", "map", m)
            w = m.view(np.uint32); b = base.view(np.uint32)
            print(label, {i: (hex(int(b[i])), hex(int(w[i]))) for i in range(32) if w[i] != b[i]}, flush=True)
        attempt(label, go)
def narrow():
    for row in (32, 64, 128):
        for inner in (16, 32, 64):
            if inner >= row: continue
            src = np.arange(64*256, dtype=np.uint16).view(np.uint8); s = aligned_bytes(src.nbytes); s[:] = src
            m = TensorMap(s.ctypes.data, "uint16", (128, 64), (256,), (inner//2, 16), row)
            out = aligned_bytes(4096)
            def go():
                t.run(f"""
                setp.eq.u32 %one, %thread, 0;
                {t.expect(m.box_bytes)}
                @%one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%tile], [%map, {{0, 0}}], [%bar];
                {t.wait()}
                @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], 4096;
                {t.COMMIT_AND_WAIT}""", "map, tensor, out", m.encode(), s, out)
                v = out.view(np.uint16).reshape(-1, 8)[:, 0]
                print("narrow", row, inner, [ (int(x)//128, int(x)%128) for x in v[:48]], flush=True)
            attempt("narrow", go)

def fill():
    for el in ("float16", "float32", "bfloat16", "uint16"):
        src = random_bytes(4096, seed=1)
        m = TensorMap(src.ctypes.data, el, (8, 4), (64,), (16, 8)).encode()
        out = aligned_bytes(1024)
        def go():
            t.run("@%one tensormap.replace.tile.fill_mode.global.b1024.b32 [%map], 1;", "map, tensor", m, src)
            w = m.view(np.uint64); w[0] = src.ctypes.data
            size = 128 * (4 if el == "float32" else 2)
            t.run(f"""{t.expect(size)}
                @%one cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%tile], [%map, {{0, 0}}], [%bar];
                {t.wait()}
                @%one cp.async.bulk.global.shared::cta.bulk_group [%out], [%tile], {size};
                {t.COMMIT_AND_WAIT}""", "map, tensor, out", m, src, out)
            print("fill", el, hexw(out)[4:12], hexw(m)[:16], flush=True)
        attempt("fill "+el, go)
fields(); narrow(); fill()
