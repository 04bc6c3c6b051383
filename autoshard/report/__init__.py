"""What users read: plans and verifications as tables and text. Nothing here imports torch.

plan_report.py            a plan as tables: weights, collectives, time and memory, the solver
verification_report.py    how far the sharded program is from the unsharded one
what_if.py                how a step moves with links, batch and sequence, and where other plans win
explain.py  diff.py       one weight of a plan; what differs between two plans
fold.py                   equal decisions of repeated layers as one row
layout.py  format.py      tables that never cut a number; times, bytes and shapes as text
"""

from __future__ import annotations
