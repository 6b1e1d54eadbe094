"""Control flow, barriers and fences.

PTX ISA: Control Flow Instructions; Parallel Synchronization and Communication.
"""

from __future__ import annotations

from flash4_torch.emulator.lower.base import NO_REGISTER, Context, EngineOp, check_modifiers, family, one_of
from flash4_torch.emulator.ptx import Address, Instruction, Negated, Operand, Vector

# The engine keeps one order of memory operations per warp and publishes at every release, which covers all
# scopes.
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_SHARED = {"shared", "shared::cta", "shared::cluster"}


@family("bra")
def branch(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"uni"}, ctx)
    return EngineOp("bra", attrs=[ctx.label(ins.operands[0])])


@family("brx.idx")
def branch_table(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"idx", "uni"}, ctx)
    index, targets = ins.operands
    assert isinstance(targets, Vector)
    return EngineOp("brx.idx", [ctx.reg(index, 4)], [ctx.label(target) for target in targets.elements])


@family("ret", "exit")
def leave(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"uni"}, ctx)
    return EngineOp("exit")


@family("trap", "brkpt")
def trap(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("trap")


@family("nop")
def nothing(ins: Instruction, ctx: Context) -> EngineOp:
    """A no-op that is not a PTX instruction: it stands where `mutate.without` has removed one."""
    return EngineOp("nop")


@family("griddepcontrol", "fence", "membar")
def fence(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers fences, which matter to the race checker only.

    A launch has no predecessor and no successor here (`early` knows who must wait for one), and the engine's
    memory is sequentially consistent.
    """
    if ins.opcode.startswith("fence.mbarrier_init"):
        return EngineOp("fence.mbarrier_init")
    if ins.opcode.startswith("fence.proxy.async"):
        # Proxies are tracked for shared memory only; a fence for global memory alone orders nothing there.
        if ins.opcode.endswith(".global"):
            return EngineOp("nop")
        return EngineOp("fence.proxy.async", attrs=[int(ins.opcode.endswith(".shared::cta"))])
    if ins.opcode.startswith(("fence.proxy", "griddepcontrol")):
        return EngineOp("nop")
    return EngineOp("fence.release")


@family("setmaxnreg")
def set_max_registers(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"inc", "dec", "sync", "aligned", "u32"}, ctx)
    return EngineOp("setmaxnreg", attrs=[ctx.integer(ins.operands[0]), int("inc" in modifiers)])


@family("bar.warp.sync")
def warp_barrier(ins: Instruction, ctx: Context) -> EngineOp:
    return EngineOp("bar.warp.sync", [ctx.reg(ins.operands[0], 4)])


@family("bar", "barrier")
def named_barrier(ins: Instruction, ctx: Context) -> EngineOp:
    """`bar` is `barrier` with `.aligned`."""
    modifiers = check_modifiers(ins, {"cta", "sync", "arrive", "aligned"}, ctx)
    one_of(("sync", "arrive"), modifiers, ctx)
    count = ctx.reg(ins.operands[1], 4) if len(ins.operands) > 1 else NO_REGISTER
    aligned = ins.opcode.startswith("bar.") or "aligned" in modifiers
    return EngineOp("barrier", [ctx.reg(ins.operands[0], 4), count], [int("sync" in modifiers), int(aligned)])


_VOTES = {"popc": 0, "and": 1, "or": 2}  # as `Vote` in barrier.cpp


@family("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def reducing_barrier(ins: Instruction, ctx: Context) -> EngineOp:
    parts = ins.opcode.split(".")
    vote = next((v for v in _VOTES if v in parts), "")
    kind = "u32" if vote == "popc" else "pred"
    if not vote or set(parts) - {"aligned", "cta"} != {parts[0], "red", vote, kind}:
        raise ctx.unsupported("modifiers")
    result, barrier, *count, source = ins.operands
    negated = isinstance(source, Negated)
    return EngineOp(
        "barrier.red",
        [
            ctx.reg(barrier, 4),
            ctx.reg(count[0], 4) if count else NO_REGISTER,
            ctx.reg(source.register if isinstance(source, Negated) else source, 0),
            ctx.reg(result, 4 if vote == "popc" else 0),
        ],
        [1, int(parts[0] == "bar" or "aligned" in parts), int(negated), _VOTES[vote]],
    )


@family("barrier.cluster")
def cluster_barrier(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(
        ins, {"cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned"}, ctx
    )
    if one_of(("arrive", "wait"), modifiers, ctx) == "wait":
        return EngineOp("barrier.cluster.wait")
    return EngineOp("barrier.cluster.arrive", attrs=[int("relaxed" in modifiers)])


def _place(ins: Instruction, operand: Operand, ctx: Context) -> tuple[int, int, int]:
    """The register, the offset and whether the address is generic (64 bits, no state space named)."""
    assert isinstance(operand, Address)
    generic = not _SHARED & set(ins.opcode.split("."))
    register, offset = ctx.address(operand, 8 if generic else 4)
    return register, offset, int(generic)


@family("mbarrier.init")
def init(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"init", "b64"} | _SHARED, ctx)
    register, offset, generic = _place(ins, ins.operands[0], ctx)
    return EngineOp("mbarrier.init", [register, ctx.reg(ins.operands[1], 4)], [offset, generic])


@family("mbarrier.inval")
def invalidate(ins: Instruction, ctx: Context) -> EngineOp:
    check_modifiers(ins, {"inval", "b64"} | _SHARED, ctx)
    register, offset, generic = _place(ins, ins.operands[0], ctx)
    return EngineOp("mbarrier.inval", [register], [offset, generic])


@family("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(ins: Instruction, ctx: Context) -> EngineOp:
    known = {"arrive", "arrive_drop", "expect_tx", "noComplete", "release", "relaxed", "b64"}
    modifiers = check_modifiers(ins, known | _SCOPES | _SHARED, ctx)
    # The state token is optional where the barrier may belong to another CTA.
    has_state = not isinstance(ins.operands[0], Address)
    state = ctx.reg(ins.operands[0], 8) if has_state else NO_REGISTER
    place, *rest = ins.operands[1:] if has_state else ins.operands
    register, offset, generic = _place(ins, place, ctx)
    return EngineOp(
        "mbarrier.arrive",
        [register, ctx.reg(rest[0], 4) if rest else NO_REGISTER, state],
        [
            offset,
            generic,
            int("expect_tx" in modifiers),
            int("arrive_drop" in modifiers),
            int("relaxed" in modifiers),
        ],
    )


@family("mbarrier.expect_tx", "mbarrier.complete_tx")
def transaction(ins: Instruction, ctx: Context) -> EngineOp:
    modifiers = check_modifiers(ins, {"expect_tx", "complete_tx", "relaxed", "b64"} | _SCOPES | _SHARED, ctx)
    register, offset, generic = _place(ins, ins.operands[0], ctx)
    sign = 1 if "expect_tx" in modifiers else -1
    return EngineOp("mbarrier.tx", [register, ctx.reg(ins.operands[1], 4)], [offset, generic, sign])


@family("mbarrier.test_wait", "mbarrier.try_wait")
def wait(ins: Instruction, ctx: Context) -> EngineOp:
    """Lowers a wait; the suspend-time hint of try_wait has no meaning here."""
    known = {"test_wait", "try_wait", "parity", "acquire", "relaxed", "b64"}
    modifiers = check_modifiers(ins, known | _SCOPES | _SHARED, ctx)
    complete, place, phase = ins.operands[:3]
    register, offset, generic = _place(ins, place, ctx)
    by_parity = "parity" in modifiers
    return EngineOp(
        "mbarrier.wait",
        [register, ctx.reg(complete, 0), ctx.reg(phase, 4 if by_parity else 8)],
        [offset, generic, int(by_parity), int("try_wait" in modifiers), int("relaxed" in modifiers)],
    )
