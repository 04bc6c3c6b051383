"""Each of the ten conversions against its definition, forward and backward, in every state.

The reference is the whole tensor. `pieces` gives what the ranks hold of it in a state; `merged` puts a
value together again, which is possible in one way only: copies must agree, shares are summed, slices are
joined. A conversion is right where merging gives the whole tensor back before and after it, and where the
same holds for its gradient in the state that the algebra says a gradient has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_ranks
from torch import Tensor

from autoshard import placement
from autoshard.placement import (
    COLLECTIVES,
    CONVERSIONS,
    I,
    Invariant,
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
)
from autoshard.runtime import conversions
from autoshard.runtime.communicator import Distributed, Simulator
from autoshard.runtime.conversions import ALL
from autoshard.runtime.operators import operator

SIZES, BLOCKS = (2, 3, 4), (1, 2, 3)
CUTS = [Shard(dim, blocks) for dim in range(3) for blocks in BLOCKS]
GRADIENT = {Invariant: Invariant, Replicate: Partial, Partial: Replicate, Shard: Shard}


def shape_for(size: int) -> tuple[int, ...]:
    """Every dimension can be cut over `size` ranks in 1, 2 or 3 blocks."""
    return (6 * size, 12 * size, 6 * size)


UNEVEN = (5, 7, 11)
"""On 2, 3 and 4 ranks the last slices are smaller; of the 5, on 4, the last is empty."""


def moves() -> list[tuple[Placement, Placement]]:
    """Every pair of different states that a conversion joins."""
    states = [I, R, P, *CUTS]
    return [
        (a, b)
        for a, b in itertools.product(states, states)
        if a != b and (type(a), type(b)) in CONVERSIONS
    ]


def moves_of(shape: tuple[int, ...]) -> list[tuple[Placement, Placement]]:
    """The moves of a tensor: only contiguous slices may be uneven."""
    whole = [p for p in (*CUTS, I, R, P) if shape != UNEVEN or getattr(p, "blocks", 1) == 1]
    return [(a, b) for a, b in moves() if a in whole and b in whole]


def gradient_of(state: Placement) -> Placement:
    """The state of the gradient of a tensor in `state`, as the algebra's first table has it."""
    return state if isinstance(state, Shard) else GRADIENT[type(state)]()


def slice_of(whole: Tensor, cut: Shard, rank: int, size: int) -> Tensor:
    """Rank's slice by its definition: `torch.chunk`'s, or of each of the equal blocks."""
    if cut.blocks == 1:
        parts = whole.chunk(size, cut.dim)
        return parts[rank] if rank < len(parts) else parts[-1].narrow(cut.dim, 0, 0)
    length = whole.shape[cut.dim] // cut.blocks
    part = length // size
    index = [block * length + rank * part + i for block in range(cut.blocks) for i in range(part)]
    return whole.index_select(cut.dim, torch.tensor(index))


def pieces(whole: Tensor, state: Placement, size: int, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of `whole` in `state`."""
    if isinstance(state, Shard):
        return [slice_of(whole, state, rank, size) for rank in range(size)]
    if isinstance(state, Partial):
        shares = [
            torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
            for _ in range(size - 1)
        ]
        return [*shares, whole - sum(shares)]
    return [whole.clone() for _ in range(size)]


def merged(parts: list[Tensor], state: Placement, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor of which the ranks hold `parts` in `state`."""
    if isinstance(state, Partial):
        return torch.stack(parts).sum(0)
    if not isinstance(state, Shard):
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], msg="the ranks' copies differ")
        return parts[0]
    whole = torch.full(shape, float("nan"), dtype=parts[0].dtype)
    positions = torch.arange(whole.numel()).view(shape)
    for rank, part in enumerate(parts):
        where = slice_of(positions, state, rank, len(parts))
        whole.view(-1)[where.reshape(-1)] = part.reshape(-1)
    return whole


def name_and_cuts(
    have: Placement, want: Placement, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    cuts = tuple(
        c for p in (have, want) if isinstance(p, Shard) for c in (p.dim, p.blocks, shape[p.dim])
    )
    return CONVERSIONS[type(have), type(want)].name, cuts


def check(
    convert: Callable[..., list[Tensor]],
    have: Placement,
    want: Placement,
    size: int,
    shape: tuple[int, ...] = (),
) -> None:
    """Forward and backward of one conversion, all ranks of it in this process."""
    shape = shape or shape_for(size)
    generator = torch.Generator().manual_seed(0)
    whole, upstream = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    xs = [x.requires_grad_() for x in pieces(whole, have, size, generator)]
    ys = convert(xs)
    torch.testing.assert_close(merged([y.detach() for y in ys], want, shape), whole)
    gradients = pieces(upstream, gradient_of(want), size, generator)
    torch.autograd.backward(ys, gradients)
    torch.testing.assert_close(merged([x.grad for x in xs], gradient_of(have), shape), upstream)
    for part, expected in zip([x.grad for x in xs], xs, strict=True):
        assert part.shape == expected.shape


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("have", "want"), moves(), ids=lambda p: str(p))
def test_conversion_on_the_simulator(have: Placement, want: Placement, size: int) -> None:
    name, cuts = name_and_cuts(have, want, shape_for(size))
    comm = Simulator(size)
    check(lambda xs: ALL[name](comm, xs, *cuts), have, want, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("have", "want"), moves_of(UNEVEN), ids=lambda p: str(p))
def test_uneven_slices_on_the_simulator(have: Placement, want: Placement, size: int) -> None:
    name, cuts = name_and_cuts(have, want, UNEVEN)
    comm = Simulator(size)
    check(lambda xs: ALL[name](comm, xs, *cuts), have, want, size, UNEVEN)


WRONG = {
    "invariant_to_replicate": "invariant_to_replicate",
    "replicate_to_invariant": "invariant_to_replicate",
    "invariant_to_shard": "shard_to_partial",
    "replicate_to_shard": "shard_to_invariant",
    "shard_to_replicate": "invariant_to_shard",
    "shard_to_invariant": "partial_to_shard",
    "shard_to_shard": "twice",
    "partial_to_replicate": "invariant_to_replicate",
    "partial_to_invariant": "partial_to_replicate",
    "partial_to_shard": "shard_to_partial",
}
"""For each conversion the backward of another, or one that is off by a factor: shapes fit, values don't."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = conversions._MOVES["shard_to_shard"][0]
    twice = lambda comm, xs, *cuts: [2 * x for x in moved(comm, xs, *cuts)]  # noqa: E731
    monkeypatch.setitem(conversions._MOVES, "twice", (twice, "shard_to_shard"))
    monkeypatch.setitem(conversions._MOVES, name, (conversions._MOVES[name][0], WRONG[name]))
    noticed = 0
    for have, want in moves():
        found, cuts = name_and_cuts(have, want, shape_for(2))
        if found == name:
            with pytest.raises(AssertionError):
                check(lambda xs, c=cuts: ALL[name](Simulator(2), xs, *c), have, want, 2)
            noticed += 1
    assert noticed


def test_the_table_is_the_code() -> None:
    assert {c.name for c in CONVERSIONS.values()} == set(ALL)
    assert len(ALL) == 10


SAMPLE = [*moves()]


@given(st.sampled_from(SAMPLE), st.sampled_from(SIZES), st.data())
def test_a_way_there_and_back_changes_nothing(
    move: tuple[Placement, Placement], size: int, data: st.DataObject
) -> None:
    """Any path through the table carries one and the same tensor, and one and the same gradient."""
    comm, generator = Simulator(size), torch.Generator().manual_seed(1)
    shape = UNEVEN if move in moves_of(UNEVEN) and data.draw(st.booleans()) else shape_for(size)
    whole, upstream = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    path = list(move)
    for _ in range(data.draw(st.integers(0, 4))):
        path.append(data.draw(st.sampled_from([b for a, b in moves_of(shape) if a == path[-1]])))
    xs = [x.requires_grad_() for x in pieces(whole, path[0], size, generator)]
    values = xs
    for have, want in itertools.pairwise(path):
        name, cuts = name_and_cuts(have, want, shape)
        values = ALL[name](comm, values, *cuts)
    torch.testing.assert_close(merged([v.detach() for v in values], path[-1], shape), whole)
    torch.autograd.backward(values, pieces(upstream, gradient_of(path[-1]), size, generator))
    torch.testing.assert_close(merged([x.grad for x in xs], gradient_of(path[0]), shape), upstream)


@pytest.mark.parametrize(
    ("have", "want", "shape"),
    [
        *((*move, shape_for(2)) for move in moves()),
        *((*move, UNEVEN) for move in moves_of(UNEVEN)),
    ],
    ids=lambda p: str(p),
)
def test_gradients_of_gradients(have: Placement, want: Placement, shape: tuple[int, ...]) -> None:
    """Of y = convert(x) the loss ½ Σ |∂(Σ y³)/∂x|² has the gradient 18 y³ (of the whole tensor)."""
    size, generator = 4 if shape == UNEVEN else 2, torch.Generator().manual_seed(2)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    name, cuts = name_and_cuts(have, want, shape)
    comm = Simulator(size)
    xs = [x.requires_grad_() for x in pieces(whole, have, size, generator)]

    def to(values: list[Tensor], a: Placement, b: Placement) -> list[Tensor]:
        if a == b:
            return values
        move, cut = name_and_cuts(a, b, shape)
        return ALL[move](comm, values, *cut)

    def cubed(values: list[Tensor], state: Placement) -> list[Tensor]:
        """A function that is not linear: on whole values, or on slices."""
        whole_values = to(values, state, I) if state == P else values
        return [v**3 for v in whole_values]

    ys = cubed(ALL[name](comm, xs, *cuts), want)
    seeds = pieces(
        torch.ones(shape, dtype=torch.float64),
        gradient_of(I if want == P else want),
        size,
        generator,
    )
    first = torch.autograd.grad(ys, xs, seeds, create_graph=True)
    torch.testing.assert_close(
        merged([g.detach() for g in first], gradient_of(have), shape), 3 * whole**2
    )
    state = gradient_of(have)
    halves = [g**2 / 2 for g in (to(list(first), state, I) if state == P else first)]
    end = I if state == P else state
    seeds = pieces(torch.ones(shape, dtype=torch.float64), gradient_of(end), size, generator)
    torch.autograd.backward(halves, seeds)
    found = merged([x.grad for x in xs], gradient_of(have), shape)
    torch.testing.assert_close(found, 18 * whole**3)


@pytest.mark.parametrize(("have", "want"), moves()[::5], ids=lambda p: str(p))
def test_a_result_may_be_written_to(have: Placement, want: Placement) -> None:
    """What copies or communicates gives memory of its own; what does nothing gives the operand's."""
    size, generator = 2, torch.Generator().manual_seed(0)
    whole = torch.randn(shape_for(size), generator=generator)
    xs = pieces(whole, have, size, generator)
    before = [x.clone() for x in xs]
    name, cuts = name_and_cuts(have, want, shape_for(size))
    with torch.no_grad():
        ys = ALL[name](Simulator(size), xs, *cuts)
        if CONVERSIONS[type(have), type(want)].forward:
            for y in ys:
                y.zero_()
    for x, old in zip(xs, before, strict=True):
        assert torch.equal(x, old)


# --- on real processes --------------------------------------------------------------------------


def each_move_on_this_rank() -> dict[str, Any]:
    """Every conversion through its torch operator: forward, backward, fake and meta kernels."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    done = 0
    cases = [(move, shape) for shape in (shape_for(size), UNEVEN) for move in moves_of(shape)]
    for (have, want), shape in cases:
        generator = torch.Generator().manual_seed(0)
        whole, upstream = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        name, cuts = name_and_cuts(have, want, shape)
        x = pieces(whole, have, size, generator)[rank].requires_grad_()
        y = operator(name)(x, *cuts, group)
        gradient = pieces(upstream, gradient_of(want), size, generator)[rank]
        y.backward(gradient)
        results = [None] * size
        dist.all_gather_object(results, (y.detach(), x.grad))
        torch.testing.assert_close(merged([r[0] for r in results], want, shape), whole)
        torch.testing.assert_close(
            merged([r[1] for r in results], gradient_of(have), shape), upstream
        )
        with FakeTensorMode() as mode:
            fake = operator(name)(mode.from_tensor(x), *cuts, group)
            assert (fake.shape, fake.dtype) == (y.shape, y.dtype)
        meta = operator(name)(x.detach().to("meta").requires_grad_(), *cuts, group)
        assert meta.shape == y.shape
        meta.backward(torch.empty_like(meta))
        done += 1
    return {"done": done, "size": Distributed(group).size}


@pytest.mark.gloo
@pytest.mark.parametrize("size", SIZES)
def test_conversions_on_gloo(size: int) -> None:
    for found in run_ranks(each_move_on_this_rank, size):
        assert found == {"done": len(moves()) + len(moves_of(UNEVEN)), "size": size}


OPCHECKED = [(I, R), (R, I), (P, I), (P, R), (P, Shard(1)), (Shard(0), I), (Shard(0), R)]
OPCHECKED += [(I, Shard(2, 3)), (R, Shard(0)), (Shard(0), Shard(1, 2))]


def checks_of_torch() -> None:
    """torch's own checks of an operator: schema, fake kernel, autograd, and AOTAutograd.

    torch's `wait_tensor` gives back its operand and says so neither in its schema nor in its fake kernel,
    so the checks of these two are left out where a collective runs.
    """
    import torch.distributed as dist

    checks = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    memory = ("test_schema", "test_faketensor")
    group = dist.group.WORLD.group_name
    for have, want in OPCHECKED:
        name, cuts = name_and_cuts(have, want, shape_for(2))
        local = CONVERSIONS[type(have), type(want)].forward not in COLLECTIVES
        x = torch.randn(shape_for(2))
        x = (slice_of(x, have, 0, 2) if isinstance(have, Shard) else x).requires_grad_()
        torch.library.opcheck(
            operator(name), (x, *cuts, group), test_utils=(*checks, *memory) if local else checks
        )
    x, *weights = (torch.randn(4, 6, requires_grad=True) for _ in range(3))
    torch.library.opcheck(operator("column_products"), (x, weights, group), test_utils=checks)
    torch.library.opcheck(operator("row_product"), (x, weights[0], group), test_utils=checks)


@pytest.mark.gloo
@pytest.mark.slow
def test_torch_checks_the_operators() -> None:
    run_ranks(checks_of_torch, 2)


def test_operators_are_torchs() -> None:
    for name in ALL:
        assert str(operator(name)) == f"autoshard.{name}.default"
        assert getattr(torch.ops.autoshard, name).default is operator(name)


def test_the_table_has_no_way_to_partial() -> None:
    assert not any(want is Partial for _, want in CONVERSIONS)
    with pytest.raises(KeyError):
        placement.conversion(I, P)
