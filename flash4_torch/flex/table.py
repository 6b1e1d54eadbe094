"""The operations that a program may hold: what every lowering has to know, and no more.

Operands of arithmetic have one dtype, since tracing writes every conversion down, and arrays of different
ranks are aligned to the right, as in torch. Names are those of torch.
"""

from __future__ import annotations

ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "div_floor",
        "div_trunc",
        "remainder",
        "fmod",
        "pow",
        "maximum",
        "minimum",
        "atan2",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
    ]
)
"""(x, y) of one dtype, which is the result's. div is the true quotient, of floating numbers."""

COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
"""(x, y) of one dtype; the result is bool."""

LOGIC = frozenset(["logical_and", "logical_or", "logical_xor", "logical_not"])
"""One or two operands of any dtype, of which zero is false; the result is bool."""

FLOATING = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "log10",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
    ]
)
"""(x,), floating like the result."""

UNARY = frozenset(["abs", "neg", "sign", "floor", "ceil", "round", "trunc", "relu", "bitwise_not"])
"""(x,) of the result's dtype."""

OPERATIONS: dict[str, str] = {
    **dict.fromkeys(ARITHMETIC | COMPARISONS, "(x, y)"),
    **dict.fromkeys(LOGIC - {"logical_not"}, "(x, y)"),
    **dict.fromkeys(FLOATING | UNARY | {"logical_not"}, "(x,)"),
    "where": "(condition, x, y): x where the condition is True, else y",
    "clamp": "(x, lowest or None, highest or None)",
    "convert": "(x,): x in the node's dtype",
    "detach": "(x,): x without its gradient",
    "constant": "(literal,): a number of the node's dtype",
    "gather": "(tensor, index, ...): an element of a captured tensor, or with fewer indices than dimensions,"
    " or None for one, an array. An index is a value or an int, and counts from the end if it is negative",
    "sum": "(x, dims, keepdim): the sum over some dimensions of an array",
    "view": "(x,): an array's elements in the node's shape",
    "expand": "(x,): an array repeated along dimensions of size 1, and new ones in front",
}
"""Every operation, and its arguments."""
