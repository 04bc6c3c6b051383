"""What an optimizer keeps for each weight, and what it needs while it updates one."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cost.compute import itemsize
from autoshard.errors import OptionsError


@dataclass(frozen=True)
class Optimizer:
    """The memory of an optimizer.

    Attributes:
        name: for messages.
        states: tensors of the weight's size and dtype that it keeps: exp_avg and exp_avg_sq are two.
        state_bytes: bytes an element that it keeps beside them, whatever the weight's dtype is: 12 for a
            float32 copy of the weight and two float32 averages.
        gradient_bytes: bytes an element of a gradient; 0 for the weight's own dtype.
        temporaries: tensors of the weight's size and dtype that the update of one weight needs at once.
    """

    name: str = "adamw"
    states: float = 2
    state_bytes: float = 0
    gradient_bytes: float = 0
    temporaries: float = 2

    def kept_bytes(self, elements: int, dtype: str) -> int:
        """Bytes that it keeps for a weight of so many elements."""
        return round(elements * (self.states * itemsize(dtype) + self.state_bytes))

    def of_gradient_bytes(self, elements: int, dtype: str) -> int:
        """Bytes of the weight's gradient."""
        return round(elements * (self.gradient_bytes or itemsize(dtype)))

    def update_bytes(self, elements: int, dtype: str) -> int:
        """Bytes that it needs while it updates the weight."""
        return round(elements * self.temporaries * itemsize(dtype))


ADAMW = Optimizer()
OPTIMIZERS = {
    known.name: known
    for known in (
        ADAMW,
        Optimizer("adam"),
        Optimizer("sgd", 0, temporaries=0),
        Optimizer("momentum", 1, temporaries=0),
        Optimizer("mixed-adamw", 0, 12, 0, 0),
    )
}
"""torch's, one weight after another, as their defaults run on DTensors; and AdamW on a float32 copy of
weights in another dtype (Rajbhandari et al. 2020, *ZeRO*: 2 + 2 + 12 bytes a weight)."""


def read_optimizer(given: Optimizer | str | float | None) -> Optimizer:
    """The optimizer that is meant: a known name, bytes of state a weight, or one as it is.

    Raises:
        OptionsError: it is none of them.
    """
    if given is None:
        return ADAMW
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, str) and given in OPTIMIZERS:
        return OPTIMIZERS[given]
    number = given
    if isinstance(given, str):
        try:
            number = float(given)
        except ValueError:
            number = None
    if isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < 1e6:
        return Optimizer(f"{number:g} bytes", 0, float(number), 0, 0)
    raise OptionsError(
        f"{given!r} is no optimizer.",
        fix=f"Use {', '.join(OPTIMIZERS)}, a number (bytes of state a weight), or an autoshard.Optimizer.",
    )
