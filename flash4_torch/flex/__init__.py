"""Programmable attention: a user's score_mod and mask_mod as programs, block masks, and the public functions.

`trace` makes a `program.Program` of a function, out of the operations of `table`; `derive` its derivative.
"""
