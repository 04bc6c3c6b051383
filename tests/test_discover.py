"""Rules found by running operators: the known ones again, custom ones, and none that is wrong."""

from __future__ import annotations

import re

import pytest
import torch

import autoshard
from autoshard.errors import RuleError
from autoshard.graph import TensorMeta
from autoshard.rules import DEFAULT, Call, Rule, discover
from autoshard.rules.rule import FIXED, Operand
from autoshard.rules.template import Template

aten = torch.ops.aten


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def called(op, args) -> Call:
    """The call as a graph would have it."""
    metas, given = [], []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            meta = TensorMeta(tuple(arg.shape), str(arg.dtype).removeprefix("torch."), True)
            given.append(Operand(len(metas), meta))
            metas.append(meta)
        else:
            given.append(tuple(arg) if isinstance(arg, list) else arg)
    made = op(*args)
    made = made if isinstance(made, tuple) else (made,)
    results = tuple(TensorMeta(tuple(t.shape), "float32", True) for t in made)
    return Call(str(op), tuple(given), {}, tuple(metas), results)


def bound(line: str, call: Call) -> Rule:
    text, linear = re.fullmatch(
        r'autoshard\.rules\.register\("[^"]+", "([^"]+)"(?:, linear="([^"]+)")?\)', line
    ).groups()
    rule = Template.parse(text, linear=linear or "").bind(call)
    assert rule is not None
    return rule


def factors(rule: Rule) -> set[frozenset]:
    """Where each factor is that the operator itself can be split by, without a program of its own."""
    lowered = {special.factor for special in rule.specials if special.lowering}
    return {
        frozenset((is_result, which, dim) for is_result, which, dim, _ in places)
        for name, places in rule.places.items()
        if not name.startswith(FIXED) and places and name not in lowered
    }


KNOWN = {
    "linear": (aten.linear.default, (randn(4, 5, 6), randn(7, 6))),
    "mm": (aten.mm.default, (randn(4, 5), randn(5, 6))),
    "bmm": (aten.bmm.default, (randn(3, 4, 5), randn(3, 5, 6))),
    "matmul": (aten.matmul.default, (randn(3, 4, 5), randn(3, 5, 6))),
    "mv": (aten.mv.default, (randn(4, 5), randn(5))),
    "add": (aten.add.Tensor, (randn(4, 5), randn(4, 5))),
    "add broadcast": (aten.add.Tensor, (randn(3, 4, 5), randn(5))),
    "mul": (aten.mul.Tensor, (randn(4, 5), randn(4, 5))),
    "relu": (aten.relu.default, (randn(4, 5),)),
    "gelu": (aten.gelu.default, (randn(4, 5),)),
    "sigmoid": (aten.sigmoid.default, (randn(4, 5),)),
    "exp": (aten.exp.default, (randn(4, 5),)),
    "where": (aten.where.self, (randn(4, 5) > 0, randn(4, 5), randn(4, 5))),
    "sum": (aten.sum.dim_IntList, (randn(4, 5, 6), [1])),
    "amax": (aten.amax.default, (randn(4, 5, 6), [1])),
    "softmax": (aten._softmax.default, (randn(4, 5, 6), 1, False)),
    "cumsum": (aten.cumsum.default, (randn(4, 5, 6), 2)),
    "transpose": (aten.transpose.int, (randn(4, 5, 6), 0, 2)),
    "attention": (
        aten.scaled_dot_product_attention.default,
        (randn(3, 4, 5, 6), randn(3, 4, 7, 6), randn(3, 4, 7, 8)),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_rules_are_found_again(name: str) -> None:
    op, args = KNOWN[name]
    call = called(op, args)
    known = DEFAULT.rule(call)
    assert known is not None
    found = bound(discover(op, args), call)
    summed = {f for f in factors(found) if not any(place[0] for place in f)}
    assert factors(known) - summed == factors(found) - summed
    assert factors(known) <= factors(found)
    assert set(known.linear) <= set(found.linear) or not known.linear


WRONG = {
    "cumsum": (aten.cumsum.default, (randn(6, 6), 1), "self[a, ·] -> y[a, ·]"),
    "softmax": (aten._softmax.default, (randn(6, 6), 1, False), "self[a, ·] -> y[a, ·]"),
    "roll": (aten.roll.default, (randn(6, 6), [1], [1]), "self[a, ·] -> y[a, ·]"),
    "flip": (aten.flip.default, (randn(6, 6), [1]), "self[a, ·] -> y[a, ·]"),
    "sort": (aten.sort.default, (randn(6, 6), 1), "self[a, ·] -> y0[a, ·] y1[a, ·]"),
    "argmax": (aten.argmax.default, (randn(6, 6), 1), "self[a, ·] -> y[a]"),
    "amax": (aten.amax.default, (randn(6, 6), [1]), "self[a, ·] -> y[a]"),
    "mean": (aten.mean.dim, (randn(6, 6), [1]), "self[a, ·] -> y[a]"),
    "prod": (aten.prod.dim_int, (randn(6, 6), 1), "self[a, ·] -> y[a]"),
    "logsumexp": (aten.logsumexp.default, (randn(6, 6), [1]), "self[a, ·] -> y[a]"),
    "norm": (aten.linalg_vector_norm.default, (randn(6, 6), 2, [1]), "self[a, ·] -> y[a]"),
    "cumprod": (aten.cumprod.default, (randn(6, 6), 1), "self[a, ·] -> y[a, ·]"),
    "tril": (aten.tril.default, (randn(6, 6),), "self[·, ·] -> y[·, ·]"),
    "trace": (aten.trace.default, (randn(6, 6),), "self[·, ·] -> y[]"),
    "count": (aten.bincount.default, (torch.arange(6),), "self[·] -> y[·]"),
    "unfold": (aten.reshape.default, (randn(6, 6), [4, 9]), "self[·, ·] -> y[·, ·]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_along_a_dimension_is_never_split_there(name: str) -> None:
    op, args, rule = WRONG[name]
    assert f'"{rule}"' in discover(op, args)


@pytest.mark.parametrize("name", ["cumsum", "roll", "flip", "tril", "mean"])
def test_what_is_linear_is_found_linear(name: str) -> None:
    op, args, _ = WRONG[name]
    assert discover(op, args).endswith('linear="self")')


@pytest.mark.parametrize("op", ["aten::relu", "aten::clamp", "aten::abs", "aten::round"])
def test_what_is_only_piecewise_linear_is_not_linear(op: str) -> None:
    args = (randn(4, 5), -1e4, 1e4) if op == "aten::clamp" else (randn(4, 5),)
    assert "linear" not in discover(op, args)


def test_a_custom_operator_is_learnt_from_its_line(capsys) -> None:
    @torch.library.custom_op("discovered::gated", mutates_args=())
    def gated(x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x @ w.T) * torch.sigmoid(gate)

    @gated.register_fake
    def _(x, w, gate):
        return x.new_empty((*x.shape[:-1], w.shape[0]))

    def backward(ctx, gradient):
        x, w, gate = ctx.saved_tensors
        s = torch.sigmoid(gate)
        inner, product = gradient * s, x @ w.T
        return inner @ w, inner.T @ x, (gradient * product).sum(0) * s * (1 - s)

    gated.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    line = discover("discovered::gated", (randn(5, 4), randn(7, 4), randn(7)))
    assert capsys.readouterr().out.strip() == line
    assert line == (
        'autoshard.rules.register("discovered::gated", "x[a, b] w[c, b] gate[c] -> y[a, c]", '
        'linear="x|w")'
    )
    exec(line, {"autoshard": autoshard})

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.gate = torch.nn.Parameter(randn(8, 4)), torch.nn.Parameter(randn(8))

        def forward(self, x):
            return torch.ops.discovered.gated(x, self.w, self.gate)

    for split in ("column", "row"):
        found = autoshard.verify(
            Gated(), 2, (randn(6, 4),), hardware="ideal", constraints={"w": split}
        )
        assert found.ok


def test_an_operator_with_a_wrong_backward_has_no_rule_there() -> None:
    """Its values are those of a product of rows, its gradient looks at all of them."""

    @torch.library.custom_op("discovered::centred", mutates_args=())
    def centred(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    centred.register_autograd(lambda ctx, g: g - g.mean(0, keepdim=True))
    assert '"x[·, a] -> y[·, a]"' in discover(centred, (randn(5, 4),))


@pytest.mark.parametrize(
    ("op", "args", "match"),
    [
        ("aten::relu_", (randn(3, 4),), "writes to its operands"),
        ("aten::dropout", (randn(3, 4), 0.5, True), "other results each time"),
        ("aten::cat", ([randn(3, 4), randn(3, 4)],), "a list of tensors"),
        ("aten::index_select", (randn(3, 4), 0, torch.tensor([1])), "after other arguments"),
        ("aten::mm", (randn(3, 4), randn(3, 4)), "does not run on the example"),
        ("aten::no_such", (randn(3, 4),), "There is no operator"),
    ],
)
def test_what_can_have_no_rule_is_refused(op, args, match) -> None:
    with pytest.raises(RuleError, match=match):
        discover(op, args)
