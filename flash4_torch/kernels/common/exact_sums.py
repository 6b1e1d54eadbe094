"""Sums of float32 numbers that have the same bits in whatever order they are added up: exact ones.

A float32 is its mantissa, of 24 bits, times a power of two from 2^-149 to 2^104. A sum is kept as `WORDS`
whole numbers of 64 bits, of which number n counts in units of 2^(WORD_BITS n - 149). A mantissa, shifted to
its place, covers parts of two neighbouring ones: each gets its part by one atomic addition of whole numbers,
which has no order. What a word gets is less than 2^WORD_BITS, so that its other bits hold the carries of
`MAX_ADDITIONS`. One more field notes infinities and NaN.
"""

WORDS = 11
FIELDS = WORDS + 1
"""Numbers of a sum: its words, then what is not finite."""
WORD_BITS = 26
MAX_ADDITIONS = 1 << (63 - WORD_BITS)
"""Additions that a sum has room for, whatever they are."""
LEAST_EXPONENT = -149
"""log2 of the unit of the first word."""
INFINITE, MINUS_INFINITE, NAN = 1, 2, 4
"""Bits of the last field: what was added."""
