"""The number and kinds of operands that an instruction takes: lowering functions rely on this check."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flash4_torch.emulator.errors import PtxError
from flash4_torch.emulator.ptx import (
    SINK,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

# The kinds of operands, one letter each:
#   D  a register to write, or `_`          S  a register, a number or a symbol to read
#   P  D, or two of them as `a|b`           N  S, or `!a`
#   V  D, or D's in braces                  X  S, or S's in braces
#   A  an address                           R  registers in braces, or one, read and written
#   I  an integer                           L  a label, T a table of them
# An entry holds the forms of the opcodes that begin with its key; the longest matching key wins. An
# instruction with L2::cache_hint has one more operand, a policy to read.
_FORMS: Mapping[str, str] = {
    "add sub mul div rem addc subc copysign and or xor shl shr": "DSS",
    "mad fma madc sad dp4a slct prmt shf bfe": "DSSS",
    "min max": "DSS DSSS",
    "neg abs not cnot rcp sqrt rsqrt ex2 lg2 sin cos tanh brev bfind clz popc testp": "DS",
    "bfi": "DSSSS",
    "lop3": "DSSSI PSSSIN",
    "setp": "PSS PSSN",
    "set": "DSS DSSN",
    "selp": "DSSN",
    "mov": "VX",
    "cvt": "DS DSS",
    "shfl": "PSSSS",
    "vote": "DNS",
    "match": "PSS",
    "redux": "DSS",
    "activemask": "D",
    "elect": "PS",
    "nanosleep": "S",
    "ld ldu": "VA",
    "st": "AX",
    "st.bulk": "AS ASI",
    "atom": "VAX VAXX",
    "red": "AX AXX",
    "ldmatrix": "VA",
    "stmatrix": "AX",
    "movmatrix cvta getctarank isspacep": "DS",
    "mapa": "DSS",
    "prefetch prefetchu applypriority": "A AI",
    "createpolicy": "D DS DSS DASS",
    "cp.async.bulk.prefetch": "A AS",
    "cp.async.bulk.tensor": "AAA AAAS AA",
    "cp.reduce.async.bulk.tensor": "AA",
    "cp.async.bulk": "AAS AASA AASAS AASS",
    "cp.reduce.async.bulk": "AAS AASA",
    "cp.async.bulk.commit_group cp.async.commit_group cp.async.wait_all": "-",
    "cp.async.bulk.wait_group cp.async.wait_group": "I",
    "cp.async": "AAI AAIS AAISS",
    "cp.async.mbarrier.arrive mbarrier.inval": "A",
    "st.async red.async": "AXA",
    "tensormap.replace": "AS AIS",
    "tensormap.cp_fenceproxy": "AAI",
    "bra": "L",
    "brx.idx": "ST",
    "ret exit trap brkpt nop griddepcontrol fence membar": "-",
    "fence.proxy.tensormap::generic": "- AI",
    "setmaxnreg": "I",
    "bar.warp.sync": "S",
    "bar barrier bar.cta barrier.cta": "S SS",
    "bar.arrive barrier.arrive bar.cta.arrive barrier.cta.arrive": "SS",
    "bar.red barrier.red bar.cta.red barrier.cta.red": "DSN DSSN",
    "barrier.cluster": "-",
    "mbarrier.init mbarrier.expect_tx mbarrier.complete_tx": "AS",
    "mbarrier.arrive mbarrier.arrive_drop": "A AS DA DAS",
    "mbarrier.test_wait mbarrier.try_wait": "DAS DASS",
    "mma.sync": "VXXX",
    "wgmma.fence wgmma.commit_group": "-",
    "wgmma.wait_group": "I",
    "wgmma.mma_async": "RXSS RXSSI RXSSII RXSSIII RXSSIIII",
    "tcgen05.alloc": "AS",
    "tcgen05.dealloc": "SS",
    "tcgen05.relinquish_alloc_permit tcgen05.wait::ld tcgen05.wait::st": "-",
    "tcgen05.fence::before_thread_sync tcgen05.fence::after_thread_sync": "-",
    "tcgen05.ld": "VA VAI",
    "tcgen05.st": "AX AIX",
    "tcgen05.ld.red": "VDA VDAI",
    "tcgen05.mma": "A*SSS A*SSSI A*SSXS A*SSXSI A*SSAAS",  # *: a descriptor or an address
    "tcgen05.mma.sp": "A*SASS A*SASSI A*SASXS A*SASXSI",
    "tcgen05.cp": "AS",
    "tcgen05.commit": "A AS",
}
FORMS = {opcode: tuple(forms.split()) for opcodes, forms in _FORMS.items() for opcode in opcodes.split()}
_WORDS = {
    "D": "a register to write",
    "P": "one or two registers to write",
    "V": "registers to write",
    "S": "a register, a number or a name",
    "N": "a predicate",
    "X": "registers or numbers",
    "A": "an address",
    "R": "registers",
    "I": "an integer",
    "L": "a label",
    "T": "labels",
    "*": "an address, a register or a number",
}


def check_form(ins: Instruction, kernel: Kernel) -> None:
    """Raises PtxError unless the instruction has the operands that its opcode takes."""
    if ins.guard and ins.guard.register.type != "pred":
        raise _wrong(ins, f"the guard {ins.guard.register.name} is not a predicate")
    forms = [form.replace("-", "") for form in _forms_of(ins)]
    fitting = [form for form in forms if len(form) == len(ins.operands)]
    if not fitting:
        counts = " or ".join(dict.fromkeys(str(len(form)) for form in forms))
        raise _wrong(ins, f"{len(ins.operands)} operands where the instruction takes {counts}")
    for i, operand in enumerate(ins.operands):
        kinds = list(dict.fromkeys(form[i] for form in fitting))
        fitting = [form for form in fitting if _is_of(operand, form[i], kernel)]
        if not fitting:
            raise _wrong(ins, f"operand {i + 1} must be {' or '.join(_WORDS[kind] for kind in kinds)}")


def _forms_of(ins: Instruction) -> list[str]:
    parts = ins.opcode.split(".")
    found = next((FORMS[p] for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in FORMS), ())
    return [form + "S" * ("L2::cache_hint" in parts) for form in found]


def _wrong(ins: Instruction, why: str) -> PtxError:
    return PtxError(why, ins.line, ins.text)


def _is_written(operand: Operand) -> bool:
    return isinstance(operand, Register) and not operand.special


def _is_read(operand: Operand) -> bool:
    return isinstance(operand, Register | Immediate | Symbol) and operand != SINK


def _all(operand: Operand, test: Callable[[Operand], bool]) -> bool:
    return all(map(test, operand.elements)) if isinstance(operand, Vector) else test(operand)


def _is_of(operand: Operand, kind: str, kernel: Kernel) -> bool:
    if kind == "D":
        return _is_written(operand)
    if kind == "P":
        both = (operand.first, operand.second) if isinstance(operand, Pair) else (operand,)
        return all(map(_is_written, both))
    if kind == "V":
        return _all(operand, _is_written)
    if kind == "R":
        return _all(operand, lambda o: _is_written(o) and o != SINK)
    if kind == "S":
        return _is_read(operand)
    if kind == "N":
        return _is_read(operand.register if isinstance(operand, Negated) else operand)
    if kind == "X":
        return _all(operand, _is_read)
    if kind == "A":
        return isinstance(operand, Address) and _is_read_in(operand)
    if kind == "I":
        return isinstance(operand, Immediate) and operand.kind == "int"
    if kind == "*":
        return _is_read(operand) or _is_of(operand, "A", kernel)
    if isinstance(operand, Vector) != (kind == "T"):
        return False
    labels = operand.elements if isinstance(operand, Vector) else (operand,)
    return all(isinstance(o, Symbol) and o.name in kernel.labels for o in labels)


def _is_read_in(address: Address) -> bool:
    return address.base != SINK and all(map(_is_read, address.coordinates))
