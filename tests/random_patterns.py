"""Productions of more than a step: lookups, space, attention, losses, writes, weights used as tensors."""

from __future__ import annotations

import math

from random_draw import Draw
from random_productions import production

# --- looking up and writing by index ------------------------------------------------------------


@production(3)
def embedding(d: Draw) -> None:
    rows, width = d.size(), d.size()
    shape = tuple(d.size() for _ in range(d.rng.randint(1, 2)))
    ids = d.ids(rows, *shape)
    options = d.choice(
        ("", "", f",padding_idx={d.rng.randrange(rows)}", ",scale_grad_by_freq=True")
    )
    x = d.emit(f"F.embedding({ids},{d.weight(rows, width)}{options})")
    if d.chance(0.3):  # tied: the table is the head
        w = d.steps[-1].operands[1]
        d.emit(f"F.linear({x},{w})")


@production(4)
def lookups(d: Draw) -> None:
    a = d.ranked(1)
    shape, dim = d.shape(a), d.dim(a)
    at = dim % len(shape)
    n, k = shape[at], d.size()
    roll = d.rng.random()
    if roll < 0.2:
        d.emit(f"{a}.index_select({dim},{d.ids(n, k)})")
    elif roll < 0.45:
        ids = d.ids(n, k) if d.chance(0.6) else d.ids(n, k, d.size())
        d.emit(f"{a}[{':,' * at}{ids}]")
    elif roll < 0.7:
        sizes = [
            k if i == at else m if d.chance(0.8) else d.rng.randint(1, m)
            for i, m in enumerate(shape)
        ]
        d.emit(f"torch.gather({a},{dim},{d.ids(n, *sizes)})")
    elif roll < 0.8:
        ids = d.emit(f"{a}.argmax({dim},keepdim=True)")
        d.emit(f"torch.take_along_dim({a},{ids},{dim})")
    elif roll < 0.9 and len(shape) > 1:
        d.emit(f"{a}[{d.ids(shape[0], k)},{d.ids(shape[1], k)}]")
    else:
        ids = d.ids(n, *(d.size() for _ in range(d.rng.randint(1, 2))))
        d.emit(f"F.one_hot({ids},{n}).double()")


@production(3)
def scattered(d: Draw) -> None:
    a = d.ranked(1)
    shape, dim = d.shape(a), d.dim(a)
    at = dim % len(shape)
    n, k = shape[at], d.rng.randint(1, 4)
    sizes = [k if i == at else m for i, m in enumerate(shape)]
    source = d.table(*sizes)
    ids, full = d.ids(n, k), d.ids(n, *sizes)
    # Writes to one place twice have no defined order: each index once, or sums.
    order = f"torch.arange({min(k, n)})"
    first = f"{source}.narrow({dim},0,{min(k, n)})"
    d.emit(d.choice((
        f"{a}.index_add({dim},{ids},{source})", f"{a}.scatter_add({dim},{full},{source})",
        f"{a}.index_copy({dim},{order},{first})", f"{a}.index_fill({dim},{ids},0.5)", f"{a}.scatter({dim},{full},0.25)",
        f"{a}.index_put(({d.ids(shape[0], k)},),{d.table(k, *shape[1:])},accumulate=True)",
        f"{a}.scatter_reduce({dim},{full},{source},'amax')", f"{a}.masked_scatter({a}>0.1,{a}.sin())",
        f"torch.zeros({list(shape)},dtype=torch.float64).index_add({dim},{ids},{source})",
        f"torch.bucketize({a},torch.tensor([-0.5,0.1,0.7],dtype=torch.float64))",
    )))  # fmt: skip


# --- space ------------------------------------------------------------------------------------------


@production(4)
def convolution(d: Draw) -> None:
    a = d.value(lambda v: v.dim() in (3, 4) and min(v.shape[2:]) >= 2)
    shape = d.shape(a)
    space, channels = len(shape) - 2, shape[1]
    groups = (
        d.choice([k for k in range(1, channels + 1) if channels % k == 0]) if d.chance(0.5) else 1
    )
    out = groups * d.rng.randint(1, 4)
    kernel = [d.rng.randint(1, min(3, n)) for n in shape[2:]]
    bias = d.weight(out) if d.chance(0.5) else "None"
    if d.chance(0.3):
        w = d.weight(channels, out // groups, *kernel)
        d.emit(f"F.conv_transpose{space}d({a},{w},{bias},{d.choice((1, 2))},0,0,{groups})")
        return
    w = d.weight(out, channels // groups, *kernel)
    padding = d.choice(("0", "1", "'same'", "'valid'"))
    stride = 1 if padding == "'same'" else d.choice((1, 2))
    d.emit(f"F.conv{space}d({a},{w},{bias},{stride},{padding},1,{groups})")


@production(2)
def pooling(d: Draw) -> None:
    a = d.value(lambda v: v.dim() in (3, 4) and min(v.shape[2:]) >= 2)
    n = len(d.shape(a)) - 2
    target = [d.rng.randint(1, 3) for _ in range(n)]
    texts = [
        f"F.max_pool{n}d({a},2)", f"F.avg_pool{n}d({a},2)", f"F.avg_pool{n}d({a},2,1)", f"F.max_pool{n}d({a},2,1,1)",
        f"F.adaptive_avg_pool{n}d({a},{target})", f"F.interpolate({a},scale_factor=2,mode='nearest')",
        f"F.adaptive_max_pool{n}d({a},{target})",
    ]  # fmt: skip
    if n == 2:
        texts += [f"F.interpolate({a},size={target},mode='{m}')" for m in ("bilinear", "bicubic")]
        texts += [f"F.pixel_unshuffle({a},2)", f"F.unfold({a},2)", f"F.pixel_shuffle({a},2)"]
    else:
        texts += [f"F.interpolate({a},size={target},mode='linear')"]
    d.emit(d.choice(texts))


@production(0.7)
def volume(d: Draw) -> None:
    """Three dimensions of space."""
    a = (
        d.value(lambda v: v.dim() == 5 and min(v.shape[2:]) >= 2)
        if d.chance(0.3)
        else d.leaf("input", (2, d.choice((2, 4)), 2, 3, 2))
    )
    channels = d.shape(a)[1]
    d.emit(d.choice((
        f"F.conv3d({a},{d.weight(d.rng.randint(1, 4), channels, 2, 1, 2)})", f"F.avg_pool3d({a},2)", f"F.max_pool3d({a},2)",
        f"F.adaptive_avg_pool3d({a},1)", f"F.conv_transpose3d({a},{d.weight(channels, 2, 1, 2, 1)})",
    )))  # fmt: skip


# --- attention and recurrence -------------------------------------------------------------------


@production(4)
def attention(d: Draw) -> None:
    """Heads from one fused projection, from three, or from values as they are; grouped at times."""
    x = d.value(lambda v: v.dim() == 3)
    b, s, width = d.shape(x)
    heads, hd = d.choice((1, 2, 3, 4)), d.choice((2, 3, 4))
    group = d.choice((1, 1, 2, heads))
    if heads % group:
        group = 1
    kv = heads // group
    if group == 1 and d.chance(0.5):
        w = d.weight(3 * heads * hd, width)
        fused = d.emit(f"F.linear({x},{w})")
        how = d.rng.random()
        if how < 0.5:
            q, k, v = d.emit_many(f"{fused}.chunk(3,-1)", 3)
        elif how < 0.75:
            q, k, v = d.emit_many(f"{fused}.view({b},{s},3,{heads},{hd}).unbind(2)", 3)
        else:
            q, k, v = d.emit_many(f"{fused}.unflatten(-1,({heads},3,{hd})).unbind(-2)", 3)
    else:
        q = d.emit(f"F.linear({x},{d.weight(heads * hd, width)})")
        k = d.emit(f"F.linear({x},{d.weight(kv * hd, width)})")
        v = d.emit(f"F.linear({x},{d.weight(kv * hd, width)})")
    q = d.emit(f"{q}.reshape({b},{s},{heads},{hd}).transpose(1,2)")
    k, v = (d.emit(f"{t}.reshape({b},{s},{kv},{hd}).transpose(1,2)") for t in (k, v))
    if d.chance(0.3):
        q = d.emit(f"F.rms_norm({q},[{hd}],{d.weight(hd)},0.1)")
    o = _attend(d, q, k, v, group)
    o = d.emit(f"{o}.transpose(1,2).reshape({b},{s},{heads * hd})")
    if d.chance(0.7):
        d.emit(f"F.linear({o},{d.weight(width, heads * hd)})+{x}")


def _attend(d: Draw, q: str, k: str, v: str, group: int) -> str:
    b, heads, s, hd = d.shape(q)
    if group > 1 and d.chance(0.4):
        k, v = (d.emit(f"{t}.repeat_interleave({group},1)") for t in (k, v))
        group = 1
    shape = [d.choice((1, n)) for n in (b, heads)]
    mask = d.table(*shape[d.rng.randint(0, 2) :], s, s)
    if group == 1 and d.chance(0.35):  # by hand
        scores = d.emit(f"{q}@{k}.mT/{math.sqrt(hd)}+{mask}")
        return d.emit(f"{scores}.softmax(-1)@{v}")
    options = d.choice(
        ("", ",is_causal=True", f",attn_mask={mask}", ",scale=0.3", f",attn_mask={mask}>-1.5")
    )
    grouped = ",enable_gqa=True" if group > 1 else ""
    return d.emit(f"F.scaled_dot_product_attention({q},{k},{v}{options}{grouped})")


@production(0.7)
def recurrence(d: Draw) -> None:
    x = d.value(lambda v: v.dim() == 3 and v.shape[-1] > 1)
    _, b, width = d.shape(x)
    h = d.choice((2, 3, 4))
    kind, gates = d.choice((("lstm", 4), ("gru", 3), ("rnn_tanh", 1)))
    weights = f"({d.weight(gates * h, width)},{d.weight(gates * h, h)},{d.weight(gates * h)},{d.weight(gates * h)})"
    start = f"torch.zeros(1,{b},{h},dtype=torch.float64)"
    state = f"({start},{start})" if kind == "lstm" else start
    d.emit(f"torch._VF.{kind}({x},{state},{weights},True,1,0.0,False,False,False)[0]")


# --- losses -----------------------------------------------------------------------------------------


@production(3)
def losses(d: Draw) -> None:
    a = d.ranked(1)
    shape = d.shape(a)
    how = d.choice(("mean", "mean", "sum", "none"))
    roll = d.rng.random()
    if roll < 0.55 and len(shape) > 1:
        rows = (shape[0], *shape[2:])
        classes = shape[1]
        ids = d.ids(classes, *rows)
        options = d.choice(
            ("", "", ",label_smoothing=0.1", f",ignore_index={d.rng.randrange(classes)}")
        )
        target = ids if d.chance(0.8) else f"{ids}.masked_fill({ids}==0,-100)"
        d.emit(f"F.cross_entropy({a},{target},reduction='{how}'{options})")
    elif roll < 0.7 and len(shape) > 1:
        ids = d.ids(shape[1], shape[0], *shape[2:])
        d.emit(f"F.nll_loss({a}.log_softmax(1),{ids},reduction='{how}')")
    else:
        b = d.table(*shape)
        d.emit(d.choice((
            f"F.mse_loss({a},{b},reduction='{how}')", f"F.l1_loss({a},{b},reduction='{how}')",
            f"F.smooth_l1_loss({a},{b},reduction='{how}')", f"F.huber_loss({a},{b},reduction='{how}')",
            f"F.binary_cross_entropy_with_logits({a},{b}.sigmoid(),reduction='{how}')",
            f"F.kl_div({a}.log_softmax(-1),{b}.softmax(-1),reduction='{how}')", f"F.cosine_similarity({a}+0.1,{b},-1)",
            f"F.cross_entropy({a},{b}.softmax(-1),reduction='{how}')" if len(shape) == 2 else f"F.mse_loss({a},{b})",
        )))  # fmt: skip


# --- weights as tensors, ties, joins ------------------------------------------------------------


@production(3)
def weight_tensors(d: Draw) -> None:
    """Weights taken as plain tensors before they multiply."""
    x = d.ranked(1)
    n, k = d.shape(x)[-1], d.size()
    w = d.weight(k, n)
    d.emit(d.choice((
        f"F.linear({x},{w}.softmax(-1))", f"F.linear({x},{w}/({w}.norm(dim=1,keepdim=True)+1)*{d.weight(k, 1)})",
        f"F.linear({x},torch.cat(({w},{d.weight(k, n)})))", f"{x}@{w}.t()", f"F.linear(F.linear({x},{w}),{w}.t())",
        f"F.linear({x},{w}[:{max(1, k // 2)}])", f"F.linear({x},{w}+{d.weight(k, 1)}@{d.weight(1, n)})", f"{w}.sum()*{x}",
        f"F.linear({x},{w}.flip(0))", f"F.linear({x},{d.weight(k * n)}.view({k},{n}))", f"{x}*{w}[0]", f"({w}@{w}.t()).sum()+{x}",
        f"F.linear({x},{w}.double())", f"F.linear({x},{w})+F.linear({x},{w}*2)", f"{w}.mean(0)+{x}", f"F.linear({x},{w}*{d.table(n)})",
    )))  # fmt: skip


@production(4)
def block(d: Draw) -> None:
    """A gated or plain feed-forward network with a residual, biases and a norm at times."""
    x = d.ranked(1, 3)
    width, hidden = d.shape(x)[-1], d.choice((4, 6, 8, 12))
    h = x
    if d.chance(0.4):
        h = d.emit(f"F.layer_norm({h},[{width}],{d.weight(width)},{d.weight(width)},0.1)")
    act = d.choice(("F.silu", "F.gelu", "torch.relu", "torch.tanh"))
    if d.chance(0.4):
        bias = f",{d.weight(2 * hidden)}" if d.chance(0.5) else ""
        g, u = d.emit_many(f"F.linear({h},{d.weight(2 * hidden, width)}{bias}).chunk(2,-1)", 2)
        h = d.emit(f"{act}({g})*{u}")
    else:
        bias = f",{d.weight(hidden)}" if d.chance(0.5) else ""
        h = d.emit(f"{act}(F.linear({h},{d.weight(hidden, width)}{bias}))")
    bias = f",{d.weight(width)}" if d.chance(0.5) else ""
    h = d.emit(f"F.linear({h},{d.weight(width, hidden)}{bias})")
    d.emit(f"{x}+{h}")


@production(1.5)
def experts(d: Draw) -> None:
    """Every token through every expert, weighed by a router."""
    x = d.value(lambda v: v.dim() in (2, 3))
    width, count, hidden = d.shape(x)[-1], d.choice((2, 3, 4)), d.choice((2, 4))
    flat = d.emit(f"{x}.reshape(-1,{width})")
    router = d.emit(f"F.linear({flat},{d.weight(count, width)}).softmax(-1)")
    up = d.emit(f"torch.einsum('td,edh->teh',{flat},{d.weight(count, width, hidden)})")
    down = d.emit(f"torch.einsum('teh,ehd->ted',torch.relu({up}),{d.weight(count, hidden, width)})")
    if d.chance(0.5):
        d.emit(f"({down}*{router}.unsqueeze(-1)).sum(1)")
    else:
        ids = d.emit(f"{router}.topk({min(2, count)},-1)[1]")
        mask = d.emit(f"F.one_hot({ids},{count}).sum(1)")
        d.emit(f"torch.einsum('ted,te->td',{down},{router}*{mask})")


# --- writes to memory -------------------------------------------------------------------------------


@production(3)
def writes(d: Draw) -> None:
    """Write to a value of the program's own: a copy, or something made before."""
    a = d.ranked(1)
    shape = d.shape(a)
    x = _memory(d, a)
    shape = d.shape(x)
    b = d.value(lambda v: v.dim() <= len(shape) and tuple(v.shape) == shape[len(shape) - v.dim() :])
    n = shape[0]
    low = d.rng.randrange(n)
    text = d.choice((
        f"{x}.add_({b})", f"{x}.mul_({b})", f"{x}.copy_({b})", f"{x}.sub_({b},alpha=0.5)", f"{x}[{low}:]=0.5", f"{x}[{low}]={b}[0] if {b}.dim()=={len(shape)} else 0.1",
        f"{x}.masked_fill_({x}>0.2,0.3)", f"{x}.clamp_(-0.5,0.5)", f"{x}[...,:1].add_(1.0)", f"{x}.index_put_(({d.ids(n, 2)},),torch.tensor(0.5,dtype=torch.float64))",
        f"{x}.index_fill_(0,{d.ids(n, 2)},0.1)", f"{x}.relu_()", f"{x}.zero_()", f"{x}.fill_(0.5)", f"{x}.transpose(0,-1).mul_(2.0)", f"{x}.view(-1)[0]=1.5",
        f"{x}.tanh_()", f"{x}[{low}:].copy_({b}[{low}:])" if d.shape(b) == shape else f"{x}.div_(2)", f"torch.ops.random_graphs.ramp_({x})",
    ))  # fmt: skip
    d.write(text)
    if d.chance(0.3):
        d.emit(f"{a}*0.5")


def _memory(d: Draw, a: str) -> str:
    """A value to write to: a new one mostly, an older one, or an input; at times with a view before it."""
    shape = list(d.shape(a))
    plain = [
        x.name for x in d.leaves if x.kind == "input" and not x.grad and list(x.shape) == shape
    ]
    if plain and d.chance(0.25):
        return d.choice(plain)
    if a[0] == "v" and d.chance(0.35):
        return a
    new = f"torch.zeros({shape},dtype=torch.float64)"
    x = d.emit(
        d.choice(
            (
                f"{a}.clone()",
                f"{a}*1.0",
                new,
                f"{a}+0",
                f"torch.empty_like({a}).copy_({a})",
                f"{a}.transpose(0,-1)+0",
            )
        )
    )
    if d.chance(0.4):
        views = (
            "{}.view(-1)", "{}[0]", "{}.transpose(0,-1)", "{}.detach()", "{}.unsqueeze(0)", "{}.reshape(-1)", "{}.mT.flatten()",
            "{}.contiguous()",
        )  # fmt: skip
        seen = d.emit(d.choice(views).format(x))
        return seen if d.shape(seen) and d.chance(0.4) else x
    return x


@production(1.5)
def state(d: Draw) -> None:
    """Write to a buffer: a running mean, a counter, a cache."""
    a = d.ranked(1, 3)
    shape = d.shape(a)
    kind = d.rng.random()
    if kind < 0.4:
        b = d.leaf("buffer", shape[1:])
        d.write(
            d.choice(
                (
                    f"{b}.mul_(0.9).add_({a}.detach().mean(0),alpha=0.1)",
                    f"{b}.copy_({a}.detach().amax(0))",
                    f"{b}.lerp_({a}.detach().sum(0),0.1)",
                )
            )
        )
    elif kind < 0.6:
        b = d.leaf("buffer", ())
        d.write(d.choice((f"{b}.add_(1)", f"torch.ops.random_graphs.record({b},{a}.detach())")))
    elif kind < 0.8:
        b = d.leaf("buffer", (shape[0] + 2, *shape[1:]))
        d.write(f"{b}[1:{shape[0] + 1}]={a}.detach()")
    else:
        b = d.leaf("buffer", shape)
        d.write(f"{b}.add_({a}.detach())")
    if d.chance(0.6):
        c = d.value(lambda v: tuple(v.shape) == d.shape(b) or v.dim() == 0)
        d.emit(f"{c}*{b}")


# --- modules ------------------------------------------------------------------------------------


@production(3)
def modules(d: Draw) -> None:
    """Layers of torch's own."""
    x = d.ranked(2, 4)
    shape, k = d.shape(x), d.size()
    width, channels = shape[-1], shape[1]
    texts = [
        f"nn.Linear({width},{k})", f"nn.LayerNorm({width},0.1)", f"nn.Sequential(nn.Linear({width},{k}),nn.ReLU(),nn.Linear({k},{width}))",
        f"nn.PReLU({channels})", f"nn.Sequential(nn.Linear({width},{k}),nn.Tanh())", f"nn.RMSNorm({width},0.1)",
        f"nn.utils.parametrizations.weight_norm(nn.Linear({width},{k}))", f"nn.Linear({width},{k},bias=False)",
    ]  # fmt: skip
    if len(shape) == 3:
        heads = d.choice([h for h in (1, 2, 3, 4) if width % h == 0])
        texts += [
            f"nn.BatchNorm1d({channels},0.1)", f"nn.Conv1d({channels},{k},1)", f"nn.InstanceNorm1d({channels},0.1)",
            f"nn.TransformerEncoderLayer({width},{heads},6,dropout=0.0,batch_first=True)", f"nn.GroupNorm({channels},{channels},0.1)",
        ]  # fmt: skip
    if len(shape) == 4:
        texts += [f"nn.BatchNorm2d({channels},0.1)", f"nn.Conv2d({channels},{k},3,padding=1)", f"nn.Conv2d({channels},{channels},3,padding=1,groups={channels})"]  # fmt: skip
    if len(shape) == 2:
        texts += [f"nn.BatchNorm1d({channels},0.1)", f"nn.Bilinear({width},{width},3)"]
    text = d.choice(texts)
    m = d.module(text)
    d.emit(f"{m}({x},{x})" if "Bilinear" in text else f"{m}({x})")


@production(0.7)
def attention_module(d: Draw) -> None:
    x = d.value(lambda v: v.dim() == 3)
    width = d.shape(x)[-1]
    heads = d.choice([h for h in (1, 2, 3, 4) if width % h == 0])
    m = d.module(f"nn.MultiheadAttention({width},{heads},batch_first=True)")
    d.emit(f"{m}({x},{x},{x},need_weights={d.chance(0.3)})[0]")


@production(1)
def without_gradient(d: Draw) -> None:
    a = d.value()
    b = _same_shape(d, a)
    d.emit(
        d.choice((f"{a}*{b}", f"{a}.sin()", f"{a}.mean()", f"{a}.amax()")),
        before="with torch.no_grad(): ",
    )


def _same_shape(d: Draw, a: str) -> str:
    return d.value(lambda v: tuple(v.shape) == d.shape(a))


ATEN = [
    "_softmax.default({},-1,False)",
    "_log_softmax.default({},0,False)",
    "alias.default({})",
    "add.Scalar({},0.5)",
    "mul.Scalar({},0.5)",
    "sub.Scalar({},0.5)",
    "div.Scalar({},3.0)",
    "div.Scalar_mode({},0.4,rounding_mode='floor')",
    "floor_divide.Scalar({},0.4)",
    "clamp_max.default({},0.4)",
    "constant_pad_nd.default({},[1,0])",
    "constant_pad_nd.default({},[0,1],0.5)",
    "concat.default([{},{}],-1)",
    "broadcast_to.default({},[2,*{}.shape])",
    "norm.ScalarOpt_dim({}.square()+0.1,2,[-1])",
    "real.default({})",
    "split.sizes({},[{}.shape[0]],0)[0]",
    "_unsafe_view.default({},[-1])",
    "type_as.default({},{})",
    "empty_like.default({}).zero_()",
    "_to_copy.default({},dtype=torch.float64)",
    "masked_fill.Tensor({},{}>0.2,torch.tensor(0.0,dtype=torch.float64))",
    "masked_fill.Tensor({},{}>0.2,{}.sum())",
    "isnan.default({})",
    "isfinite.default({})",
    "isinf.default({})",
    "all.default({}>0.5)",
    "select.int({},0,0)",
    "max.dim({},-1)[0]",
]
WHOLES = [
    "{}&3",
    "{}|1",
    "{}<<1",
    "{}>>1",
    "{}.bitwise_and(3)",
    "{}.bitwise_or({})",
    "{}.bitwise_xor({})",
    "{}//2",
    "{}%3",
    "{}*2+1",
    "({}+1)/2",
    "{}.cumsum(0)",
    "{}.double()",
    "{}.sum(-1)",
    "-{}",
    "{}.eq(1)",
    "{}.clamp(max=2)",
    "{}.flip(0)",
    "{}*1.5",
    "{}.float().mean()",
    "{}.bitwise_left_shift({})",
    "{}.sort()[0]",
]


@production(2)
def direct(d: Draw) -> None:
    """Operators as export may leave them, which Python seldom writes."""
    a = d.ranked(1)
    text = d.choice(ATEN)
    d.emit(f"torch.ops.aten.{text}".replace("{}", a))


@production(1.5)
def integers(d: Draw) -> None:
    a = d.other(lambda v: v.dim() > 0 and str(v.dtype) == "torch.int64")
    d.emit(d.choice(WHOLES).replace("{}", a))


@production(0.7)
def complex_numbers(d: Draw) -> None:
    a = d.ranked(1)
    z = f"torch.complex({a},{a}.cos())"
    d.emit(d.choice((
        f"{z}.conj().imag", f"({z}*{z}).real", f"torch.view_as_real({z}.conj())", f"{z}.abs()", f"({z}.conj()*{z}).resolve_conj().real", f"{z}.angle()",
        f"{z}.sum(-1).real", f"({z}@{z}.mT.conj()).real",
    )))  # fmt: skip


# --- operators that nobody has told the planner of ----------------------------------------------


@production(1.5)
def unknown(d: Draw) -> None:
    a = d.ranked(1, 3)
    o = "torch.ops.random_graphs"
    roll = d.rng.random()
    if roll < 0.4:
        d.emit(f"{o}.mix({a},{d.table(d.shape(a)[-1])})")
    elif roll < 0.6:
        d.emit_many(f"{o}.halves({a})", 2)
    elif roll < 0.8:
        d.emit(f"{o}.turned({a})")
    elif roll < 0.9:
        d.emit(f"{o}.noise({a})*{a}")
    else:
        d.emit(d.choice((
            f"torch.fft.rfft({a}).abs()", f"torch.view_as_real(torch.view_as_complex(torch.stack(({a},{a}.sin()),-1))*torch.polar({a}.cos().exp(),{a})).flatten(-2)",
            f"torch.complex({a},{a}.cos()).real", f"torch.cdist({a},{a}.sin()+0.1)", f"torch.histc({a}.detach(),4)", f"torch.linalg.det({a}.mT@{a}+torch.eye({d.shape(a)[-1]},dtype=torch.float64))",
            f"torch.rand_like({a})+{a}", f"torch.arange({d.shape(a)[-1]})*{a}", f"torch.linspace(0,1,{d.shape(a)[-1]})*{a}", f"torch.kron({a},torch.ones(2,dtype=torch.float64))",
        )))  # fmt: skip
