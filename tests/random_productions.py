"""What random programs are made of: each function here adds a step or a small pattern of steps.

Together they draw every operator that has a rule (`test_random_graphs` counts), and some that have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from random_draw import Draw, Production, Skip

PRODUCTIONS: list[Production] = []
WEIGHTS: list[float] = []


def production(weight: float) -> Callable[[Production], Production]:
    """Decorator: draw the function below that often, against the others' weights."""

    def keep(function: Production) -> Production:
        PRODUCTIONS.append(function)
        WEIGHTS.append(weight)
        return function

    return keep


# --- elementwise --------------------------------------------------------------------------------

SMOOTH = [
    "F.silu({})",
    "F.gelu({})",
    "torch.tanh({})",
    "torch.sigmoid({})",
    "torch.sin({})",
    "torch.cos({})",
    "F.softplus({})",
    "F.mish({})",
    "F.elu({})",
    "torch.square({})",
    "-{}",
    "torch.erf({})",
    "torch.atan({})",
    "torch.asinh({})",
    "torch.exp(torch.tanh({}))",
    "torch.log1p({}.abs())",
    "torch.sqrt({}.abs()+1)",
    "torch.rsqrt({}.square()+1)",
    "torch.reciprocal({}.square()+1)",
    "{}.pow(2)",
    "{}.square().add(0.5).pow(0.3)",
    "torch.expm1(torch.tanh({}))",
    "F.logsigmoid({})",
    "F.selu({})",
    "F.celu({})",
    "F.gelu({},approximate='tanh')",
    "torch.erfc({})",
    "torch.special.expm1({}.tanh())",
    "torch.sinc({})",
    "torch.exp2({}.tanh())",
    "torch.lgamma({}.square()+1)",
    "torch.digamma({}.square()+1)",
    "torch.logit({}.sigmoid())",
    "torch.log({}.square()+1)",
    "torch.log2({}.square()+1)",
    "torch.log10({}.square()+1)",
    "torch.sinh({}.tanh())",
    "torch.cosh({}.tanh())",
    "torch.acos({}.tanh()*0.9)",
    "torch.asin({}.tanh()*0.9)",
    "torch.atanh({}.tanh()*0.9)",
    "torch.acosh({}.square()+1.1)",
    "torch.tan({}.tanh())",
    "torch.erfinv({}.tanh()*0.9)",
    "2.0**{}.tanh()",
    "{}.clone()",
    "{}.contiguous()",
    "{}*1.5",
    "{}+0.25",
    "{}-0.5",
    "1.5-{}",
    "{}/3",
    "1/({}.square()+1)",
    "torch.add({},2,alpha=0.5)",
    "{}.detach()",
    "{}.float().double()",
    "torch.positive({})",
]
KINKED = [
    "torch.relu({})",
    "{}.abs()",
    "F.leaky_relu({},0.1)",
    "F.hardtanh({})",
    "F.hardswish({})",
    "F.hardsigmoid({})",
    "F.relu6({})",
    "{}.clamp(-0.7,0.9)",
    "{}.clamp(max=0.5)",
    "{}.clamp(min=-0.5)",
    "F.softshrink({},0.2)",
    "F.hardshrink({},0.3)",
    "{}.floor()",
    "{}.round()",
    "torch.trunc({})",
    "torch.frac({})",
    "torch.sign({})",
    "{}.ceil()",
    "torch.nan_to_num({})",
    "F.threshold({},0.1,-0.5)",
    "{}.fmod(0.7)",
    "{}.remainder(0.7)",
    "torch.div({},0.4,rounding_mode='floor')",
    "torch.div({},0.4,rounding_mode='trunc')",
    "torch.zeros_like({})",
    "torch.ones_like({})",
    "torch.full_like({},0.5)",
    "torch.floor_divide({},0.4)",
]


@production(6)
def smooth(d: Draw) -> None:
    d.emit(d.choice(SMOOTH).format(d.value()))


@production(3)
def kinked(d: Draw) -> None:
    d.emit(d.choice(KINKED).format(d.value()))


BINARY = [
    "{}+{}",
    "{}-{}",
    "{}*{}",
    "{}/({}.square()+1)",
    "torch.maximum({},{})",
    "torch.minimum({},{})",
    "torch.add({},{},alpha=0.7)",
    "torch.sub({},{},alpha=0.3)",
    "torch.rsub({},{})",
    "torch.logaddexp({},{})",
    "torch.atan2({},{}.square()+0.5)",
    "torch.fmod({},{}.square()+0.5)",
    "torch.remainder({},{}.square()+0.5)",
    "torch.pow({}.sigmoid()+0.5,{}.tanh())",
    "torch.xlogy({},{}.square()+0.5)",
    "torch.max({},{})",
    "torch.min({},{})",
    "torch.true_divide({},{}.square()+1)",
    "torch.hypot({},{}+0.1)",
    "torch.lerp({},{},0.3)",
    "torch.special.xlog1py({},{}.square())",
    "torch.copysign({},{})",
    "torch.div({},{}.square()+1,rounding_mode='floor')",
]


def _fits(d: Draw, name: str) -> str:
    """A value, old or new, that broadcasts with another."""
    shape = d.shape(name)
    if d.chance(0.6):
        return d.value(lambda v: _broadcasts(tuple(v.shape), shape))
    keep = d.rng.randint(0, len(shape))
    kept = [n if d.chance(0.75) else 1 for n in shape[len(shape) - keep :]]
    return d.table(*kept)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


@production(9)
def binary(d: Draw) -> None:
    a = d.value()
    pair = [a, _fits(d, a)]
    d.rng.shuffle(pair)
    weights = [8, 3, 8] + [1] * (len(BINARY) - 3)
    d.emit(d.rng.choices(BINARY, weights)[0].format(*pair))


@production(1)
def ternary(d: Draw) -> None:
    a = d.value()
    b, c = _fits(d, a), _fits(d, a)
    text = d.choice((
        "torch.addcmul({},{},{},value=0.5)", "torch.addcdiv({},{},{}.square()+1,value=0.5)",
        "torch.clamp({},{}-1,{}+1)", "torch.lerp({},{},{}.sigmoid())", "torch.where({}>0.1,{},{})",
    ))  # fmt: skip
    d.emit(text.format(a, b, c))


COMPARE = ["{}>{}", "{}<{}", "{}>={}", "{}<={}", "{}!={}", "{}=={}"]


@production(2)
def masks(d: Draw) -> None:
    a = d.value()
    text = d.choice(COMPARE).format(a, _fits(d, a) if d.chance(0.5) else "0.1")
    mask = d.emit(text)
    if d.chance(0.3):
        other = d.other(lambda v: str(v.dtype) == "torch.bool")
        mask = d.emit(d.choice(("{}&{}", "{}|{}", "{}^{}", "torch.logical_and({},{})", "torch.logical_or({},{})", "torch.logical_xor({},{})")).format(mask, other))  # fmt: skip
    if d.chance(0.2):
        mask = d.emit(d.choice(("~{}", "torch.logical_not({})")).format(mask))
    shape = d.shape(mask)
    b = d.value(lambda v: _broadcasts(tuple(v.shape), shape))
    text = d.choice((
        "torch.where({m},{b},{a})", "{b}.masked_fill({m},0.0)", "{b}.masked_fill({m},-1.5)", "{b}*{m}",
        "torch.where({m},{b},0.0)", "torch.where({m},1.0,{b})", "torch.where({m},1.0,0.0)", "{m}.double()+{b}",
        "{m}.sum(-1)", "{m}.any(-1)", "{m}.all(0)", "{m}.to({b}.dtype).cumsum(0)", "{b}.masked_fill({m},float('-inf')).softmax(-1)",
        "{m}.long().argmax(-1)", "{m}.any()", "{m}.double().mean()",
    ))  # fmt: skip
    d.emit(text.format(m=mask, a=a, b=b))


# --- products -----------------------------------------------------------------------------------


@production(9)
def linear(d: Draw) -> None:
    x = d.ranked(1)
    out, width = d.size(), d.shape(x)[-1]
    bias = f",{d.table(out)}" if d.chance(0.5) else ""
    d.emit(f"F.linear({x},{d.weight(out, width)}{bias})")


@production(4)
def matmul(d: Draw) -> None:
    a = d.ranked(1)
    k = d.shape(a)[-1]
    if d.chance(0.5):
        b = d.value(lambda v: v.dim() > 0 and v.shape[-1 if v.dim() == 1 else -2] == k)
        d.emit(f"{a}@{b}")
    elif d.chance(0.5):
        b = d.value(lambda v: v.dim() > 1 and v.shape[-1] == k)
        turn = d.choice((".mT", ".transpose(-1,-2)", ".transpose(-2,-1)"))
        d.emit(f"{a}@{b}{turn}")
    else:
        d.emit(f"torch.matmul({a},{d.weight(k, d.size())})")


@production(2)
def products(d: Draw) -> None:
    a = d.ranked(1, 3)
    shape = d.shape(a)
    if len(shape) == 1:
        b = d.value(lambda v: v.dim() == 1)
        text = "torch.outer({},{})" if d.shape(b) != shape or d.chance(0.5) else "torch.dot({},{})"
        d.emit(text.format(a, b))
    elif len(shape) == 2:
        n = d.size()
        d.emit(d.choice((
            f"torch.mm({a},{d.weight(shape[1], n)})", f"torch.mv({a},{d.weight(shape[1])})",
            f"torch.addmm({d.table(n)},{a},{d.weight(shape[1], n)})",
            f"torch.addmm({d.table(shape[0], n)},{a},{d.weight(shape[1], n)},beta=0.5,alpha=0.7)",
        )))  # fmt: skip
    else:
        n = d.size()
        w = d.weight(shape[0], shape[2], n)
        bias = d.table(shape[0], 1, n) if d.chance(0.5) else d.table(n)
        d.emit(d.choice((f"torch.bmm({a},{w})", f"torch.baddbmm({bias},{a},{w},beta=0.5)")))


@production(3)
def einsum(d: Draw) -> None:
    a = d.ranked(1)
    letters = "abcdefgh"[: len(d.shape(a))]
    sizes = dict(zip(letters, d.shape(a), strict=True))
    second = [n for n in letters if d.chance(0.6)]
    for new in "yz"[: d.rng.randint(0, 2)]:
        sizes[new] = d.size()
        second.append(new)
    d.rng.shuffle(second)
    if not second:
        raise Skip
    b = d.table(*(sizes[n] for n in second))
    left = [n for n in dict.fromkeys([*letters, *second]) if d.chance(0.65)]
    d.rng.shuffle(left)
    d.emit(f"torch.einsum('{letters},{''.join(second)}->{''.join(left)}',{a},{b})")


# --- views --------------------------------------------------------------------------------------


def _factors(d: Draw, n: int) -> list[int]:
    """n as a product of one to three numbers."""
    found = []
    while len(found) < 2 and n > 1 and d.chance(0.7):
        part = d.choice([k for k in range(1, n + 1) if n % k == 0])
        found.append(part)
        n //= part
    return [*found, n]


@production(7)
def reshape(d: Draw) -> None:
    a = d.value()
    shape = list(d.shape(a))
    roll = d.rng.random()
    if roll < 0.15:
        d.emit(f"{a}.flatten()")
    elif roll < 0.3 and len(shape) > 1:
        at = d.rng.randrange(len(shape) - 1)
        d.emit(f"{a}.flatten({at},{at + 1})")
    elif roll < 0.5 and shape:
        at = d.rng.randrange(len(shape))
        d.emit(f"{a}.unflatten({at},{tuple(_factors(d, shape[at]))})")
    else:
        sizes = _random_shape(d, shape)
        if sizes and d.chance(0.4):
            sizes[d.rng.randrange(len(sizes))] = -1
        name = d.choice(("reshape", "view"))
        d.emit(f"{a}.{name}({sizes})")


def _random_shape(d: Draw, shape: list[int]) -> list[int]:
    """Another shape of as many elements: dimensions merged and cut, at times across each other."""
    if d.chance(0.2):
        return _factors(d, math.prod(shape))
    made: list[int] = []
    for n in shape:
        if made and d.chance(0.35):
            made[-1] *= n
        else:
            made.append(n)
    return [part for n in made for part in (_factors(d, n) if d.chance(0.5) else [n])]


@production(5)
def permute(d: Draw) -> None:
    a = d.ranked(1, 5)
    rank = len(d.shape(a))
    order = list(range(rank))
    d.rng.shuffle(order)
    i, j = d.dim(a), d.dim(a)
    texts = [f"{a}.permute({order})", f"{a}.transpose({i},{j})", f"{a}.movedim({i},{j})"]
    texts += [f"{a}.mT"] if rank > 1 else []
    texts += [f"{a}.t()"] if rank < 3 else []
    text = d.choice(texts)
    d.emit(text + (".contiguous()" if d.chance(0.2) else ""))


@production(3)
def ones(d: Draw) -> None:
    """Dimensions of size one come, go and stretch."""
    a = d.value(lambda v: v.dim() < 5)
    shape = d.shape(a)
    if 1 in shape and d.chance(0.6):
        at = d.choice([i for i, n in enumerate(shape) if n == 1])
        sizes = [d.size() if i == at else d.choice((n, -1)) for i, n in enumerate(shape)]
        d.emit(
            d.choice(
                (
                    f"{a}.squeeze({at})",
                    f"{a}.squeeze()",
                    f"{a}.expand({sizes})",
                    f"{a}.squeeze(({at},))",
                )
            )
        )
    elif d.chance(0.4):
        d.emit(f"{a}.expand({[d.size(), *shape]})")
    else:
        at = d.rng.randint(-1 - len(shape), len(shape))
        d.emit(d.choice((f"{a}.unsqueeze({at})", f"{a}[None]", f"{a}[...,None]")))


@production(5)
def parts(d: Draw) -> None:
    """Cut to parts, change them, and join some of them again."""
    a = d.ranked(1)
    dim = d.dim(a)
    n = d.shape(a)[dim]
    count = d.choice([k for k in (2, 3, 4) if k <= n])
    roll = d.rng.random()
    if roll < 0.4:
        size = -(-n // count)
        names = d.emit_many(f"{a}.chunk({count},{dim})", -(-n // size))
    elif roll < 0.6:
        names = d.emit_many(f"{a}.split({n // count},{dim})", -(-n // (n // count)))
    elif roll < 0.8:
        cut = sorted(d.rng.sample(range(1, n), count - 1))
        sizes = [b - a for a, b in zip([0, *cut], [*cut, n], strict=True)]
        names = d.emit_many(f"{a}.split({sizes},{dim})", count)
    else:
        names = d.emit_many(f"{a}.unbind({dim})", n)
    if len(names) < 2:
        return
    one, two = d.rng.sample(names, 2)
    if d.shape(one) == d.shape(two) and d.chance(0.6):
        d.emit(d.choice(("F.silu({})*{}", "{}+{}", "{}*{}.sigmoid()")).format(one, two))


@production(4)
def join(d: Draw) -> None:
    a = d.ranked(1)
    shape, dim = d.shape(a), d.dim(a)
    at = dim % len(shape)

    def fits(v) -> bool:
        return v.dim() == len(shape) and all(
            m == n or i == at for i, (m, n) in enumerate(zip(v.shape, shape, strict=True))
        )

    found = [a] + [d.value(fits) for _ in range(d.rng.randint(1, 2))]
    if d.chance(0.3):
        found[-1] = d.table(*(d.size() if i == at else n for i, n in enumerate(shape)))
    d.rng.shuffle(found)
    same = len({d.shape(n) for n in found}) == 1
    name = d.choice(("stack", "cat", "cat")) if same else "cat"
    d.emit(f"torch.{name}(({','.join(found)}),{dim})")


@production(5)
def sliced(d: Draw) -> None:
    a = d.ranked(1)
    dim = d.dim(a)
    n, at = d.shape(a)[dim], dim % len(d.shape(a))
    low = d.rng.randrange(n)
    high = d.rng.randint(low + 1, n)
    lead = ":," * at
    d.emit(d.choice((
        f"{a}[{lead}{low}:{high}]", f"{a}[{lead}{low}:{high}]", f"{a}[{lead}{d.choice((-1, low))}]",
        f"{a}[{lead}::{d.choice((1, 2))}]", f"{a}.narrow({dim},{low},{high - low})", f"{a}.select({dim},{low})",
        f"{a}[...,:{-(-d.shape(a)[-1] // 2)}]", f"{a}[{lead}{low}:]", f"{a}[{lead}:{high}]",
    )))  # fmt: skip


@production(4)
def moved(d: Draw) -> None:
    """Elements move within a dimension, or it is padded or repeated."""
    a = d.ranked(1)
    rank, dim = len(d.shape(a)), d.dim(a)
    pads = [d.rng.randint(0, 2) for _ in range(2 * d.rng.randint(1, rank))]
    counts = [d.choice((1, 1, 2, 3)) for _ in range(rank + d.rng.randint(0, 1))]
    d.emit(d.choice((
        f"{a}.flip({dim})", f"{a}.flip({list(range(rank))})", f"torch.roll({a},{d.rng.randint(-3, 3)},{dim})",
        f"torch.roll({a},1)", f"F.pad({a},{pads})", f"F.pad({a},{pads},value=0.5)", f"F.pad({a},(1,-1))",
        f"{a}.repeat({counts})", f"{a}.repeat_interleave({d.rng.randint(1, 3)},{dim})", f"{a}.tile({counts})",
        f"{a}.tril()", f"{a}.triu(1)", f"F.pad({a},(1,1),mode='{d.choice(('reflect', 'replicate', 'circular'))}')",
        f"{a}.diff(dim={dim})", f"{a}.unfold({dim},2,1)", f"{a}.diagonal(0,0,-1)", f"torch.as_strided({a},(2,),(1,))", f"torch.rot90({a},1,(0,-1))",
    )))  # fmt: skip


# --- reductions and what looks along a dimension --------------------------------------------------


@production(6)
def reduced(d: Draw) -> None:
    a = d.ranked(1)
    rank = len(d.shape(a))
    dims: object = d.dim(a)
    if d.chance(0.4):
        dims = tuple(d.rng.sample(range(rank), d.rng.randint(1, rank)))
    keep = ",keepdim=True" if d.chance(0.5) else ""
    one = d.dim(a)
    several = f"{dims}{keep}"
    d.emit(d.choice((
        f"{a}.sum({several})", f"{a}.mean({several})", f"{a}.sum({several})", f"{a}.mean({several})",
        f"{a}.sum()", f"{a}.mean()", f"{a}.amax({several})", f"{a}.amin({several})", f"{a}.var({several})",
        f"torch.var({a},{dims},correction=0{keep})", f"torch.std({a}+{a}.cumsum(-1),{dims},correction=0{keep})",
        f"torch.logsumexp({a},{several})", f"{a}.prod({one}{keep})", f"({a}.square()+0.1).sqrt().norm(dim={dims}{keep})",
        f"torch.linalg.vector_norm({a}.square()+0.1,dim={dims}{keep})", f"torch.linalg.vector_norm({a}+0.01,1)",
        f"{a}.max({one}{keep})[0]", f"{a}.min({one}{keep})[0]", f"{a}.max()", f"{a}.min()", f"{a}.argmax({one}{keep})",
        f"{a}.argmin({one})", f"{a}.argmax()", f"{a}.contiguous().median({one})[0]", f"torch.var_mean({a},{dims},correction=0{keep})[0]",
        f"{a}.std({one})", f"{a}.norm()", f"torch.count_nonzero({a}>0.1,{one})", f"{a}.prod()", f"{a}.nansum({one})",
    )))  # fmt: skip


@production(4)
def along(d: Draw) -> None:
    a = d.ranked(1)
    dim = d.dim(a)
    n = d.shape(a)[dim]
    d.emit(d.choice((
        f"{a}.softmax({dim})", f"{a}.log_softmax({dim})", f"{a}.softmax({dim})", f"{a}.cumsum({dim})",
        f"{a}.sigmoid().cumprod({dim})", f"{a}.sort({dim})[0]", f"{a}.sort({dim},descending=True)[0]",
        f"{a}.argsort({dim})", f"{a}.topk({d.rng.randint(1, n)},{dim})[0]", f"F.glu({a},{dim})",
        f"F.normalize({a}+0.1,dim={dim})", f"{a}.cummax({dim})[0]", f"{a}.logcumsumexp({dim})", f"F.softmin({a},{dim})",
        f"{a}/({a}.norm(dim={dim},keepdim=True)+1)", f"{a}-{a}.mean({dim},keepdim=True)",
    )))  # fmt: skip


@production(3)
def norms(d: Draw) -> None:
    a = d.ranked(2)
    shape = d.shape(a)
    last, channels = d.rng.randint(1, len(shape) - 1), shape[1]
    tail = list(shape[len(shape) - last :])
    groups = d.choice([k for k in range(1, channels + 1) if channels % k == 0])
    affine = d.chance(0.7)

    def pair(*sizes: int) -> str:
        return f",{d.weight(*sizes)},{d.weight(*sizes)}" if affine else ",None,None"

    roll = d.rng.random()
    if roll < 0.35:
        d.emit(f"F.layer_norm({a},{tail}{pair(*tail)},0.1)")
    elif roll < 0.55:
        weight = d.weight(*tail) if affine else "None"
        d.emit(f"F.rms_norm({a},{tail},{weight},0.1)")
    elif roll < 0.75:
        d.emit(f"F.group_norm({a},{groups}{pair(channels)},0.1)")
    else:
        mean, var = "None", "None"
        if d.chance(0.7):
            mean = d.leaf("buffer", (channels,))
            var = d.leaf("buffer", (channels,), "positive")
        training = mean == "None" or d.chance(0.7)
        name = d.choice(("batch_norm", "batch_norm", "instance_norm"))
        d.emit(f"F.{name}({a},{mean},{var}{pair(channels)},{training},0.1,0.1)")
