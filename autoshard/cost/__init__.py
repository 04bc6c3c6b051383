"""Costs: what an operator, a conversion and a byte are predicted to take on given hardware.

`hardware` holds machines as data, `comm` prices collectives and copies, `compute` prices operators.
Times are seconds (`_s`), sizes bytes (`_bytes`), rates a second. Nothing here imports torch.
"""
