"""Reports: readable at any width, nothing left out, no number cut."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from sample_plans import PLANS, llama_plan, mesh_plan, slow_plan

from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.placement import I, Shard
from autoshard.plan_types import Cost, Plan
from autoshard.report import format as fmt
from autoshard.report.fold import fold_collectives, fold_weights
from autoshard.report.layout import LEAST_WIDTH
from autoshard.verification import Verification

WIDTHS = (60, 80, 100, 120, 160, 240)


def rendered(thing: Plan | Verification, width: int, *, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        color_system="truecolor" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
    )
    thing.report(console)
    return file.getvalue()


def joined(text: str) -> str:
    """A report without its spaces and line breaks: what was wrapped is whole again."""
    return re.sub(r"[\s│╭╮╰╯─]+", "", text)


def spaced(text: str) -> str:
    return re.sub(r"[\s│]+", " ", text)


# ---- the plan's page ------------------------------------------------------------------------


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_no_line_is_wider_than_the_console_and_nothing_is_cut(name, width, colour):
    text = rendered(PLANS[name](), width, colour=colour)
    assert ("\x1b[" in text) is colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(cell_len, plain.splitlines())) <= max(width, LEAST_WIDTH)
    assert "…" not in plain


def numbers(plan: Plan) -> set[str]:
    """Every number that a report must show, as it shows it."""
    found = {fmt.seconds(plan.cost.step_s), fmt.size(plan.cost.memory.peak_bytes)}
    for row in fold_weights(plan.weights):
        found |= {fmt.shape(row.first.shape), fmt.shape(row.first.local_shape)}
        found.add(fmt.size(row.stored_bytes))
    for row in fold_collectives(plan.collectives):
        found |= {fmt.shape(row.tensor_shape), fmt.size(row.bytes), f"×{row.count:,}"}
        found.add(fmt.seconds(row.count * row.time_s))
    for cost in (plan.cost, *plan.cost.baselines.values()):
        found |= {fmt.seconds(cost.compute_s), fmt.seconds(cost.comm_s), fmt.seconds(cost.step_s)}
        parts = cost.memory.parts
        sums = [parts["weights"] + parts["buffers"], parts["transient"] + parts["gathered"]]
        alone = [parts[name] for name in ("gradients", "optimizer", "activations")]
        found |= {fmt.size(size) for size in (*sums, *alone, cost.memory.peak_bytes)}
    most = plan.cost.memory
    each = (most.gradients_bytes, most.activations_bytes, most.transient_bytes, most.gathered_bytes,
            most.buffers_bytes, most.slack_bytes)  # fmt: skip
    found |= {fmt.size(size) for size in each if size}
    for row in plan.fallbacks:
        found |= {f"×{row.count:,}", fmt.seconds(row.cost_s)}
    found |= {f"{plan.solver.binaries:,} binaries", f"{plan.solver.constraints:,} constraints"}
    return found | {f"gap {fmt.percent(plan.solver.gap)}"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_every_number_is_shown_whole(name, width):
    plan = PLANS[name]()
    text = spaced(rendered(plan, width))
    missing = {number for number in numbers(plan) if number not in text}
    assert not missing


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_every_name_and_reason_is_shown(name, width):
    plan = PLANS[name]()
    text = joined(rendered(plan, width))
    words = {plan.model, str(plan.mesh), plan.hardware, *plan.inputs, *plan.notes}
    words |= {plan.solver.name, plan.solver.status, *plan.cost.baselines} - {"all"}
    for row in fold_weights(plan.weights):
        words |= {row.first.split, *row.first.fqns[1:]}
        words.add(f"layers {row.layers}" if row.layers else row.first.split)
    for row in plan.collectives:
        words |= {row.kind, row.phase, fmt.operator(row.op)}
    for row in plan.fallbacks:
        words |= {row.op, *row.modules}
    words |= {text for pair in plan.constraints for text in pair}
    missing = [
        word for word in words if not all(joined(part) in text for part in re.split(r"[._ ]", word))
    ]
    assert not missing
    if width >= 80:
        lines = spaced(rendered(plan, max(width, 240)))
        for row in fold_weights(plan.weights):
            assert row.name in lines
        for reason in {row.reason for row in (*plan.weights, *plan.collectives)}:
            assert all(word in text for word in reason.split())


def test_repeated_layers_are_one_row():
    text = rendered(llama_plan(), 80)
    assert text.count("mlp.down_proj.weight ×32") == 1
    assert "layers.0." not in text
    (line,) = [line for line in text.splitlines() if "mlp.down_proj.weight" in line]
    assert re.search(r"weight ×32 +row +4096×14336 +448 MiB +c", line)


def test_equal_collectives_are_one_row_with_the_sum_of_their_counts():
    plan = llama_plan()
    twice = dataclasses.replace(plan, collectives=(*plan.collectives, plan.collectives[0]))
    (first, *rest) = fold_collectives(twice.collectives)
    assert (first.count, len(rest)) == (64, len(plan.collectives) - 1)
    assert "×64" in rendered(twice, 80)
    assert "163 in a step" in rendered(twice, 80)


def test_layers_that_differ_are_rows_that_say_which():
    text = joined(rendered(mesh_plan(), 80))
    assert "×20layers0–19" in text
    assert "×4layers20–23" in text


def test_reasons_have_letters_where_there_is_no_room():
    assert re.search(r"\n a vocabulary split: ids", rendered(llama_plan(), 80))
    assert not re.search(r"\n a vocabulary split: ids", rendered(llama_plan(), 160))


def test_a_plan_slower_than_no_sharding_says_so_in_red():
    text = rendered(slow_plan(), 160, colour=True)
    assert re.search(
        r"\x1b\[1;31mSLOWER than no sharding at all: 2 ranks together are predicted to take 21\.6× "
        r"the 2 µs that one rank takes alone\.",
        text,
    )
    assert "SLOWER" not in rendered(llama_plan(), 160)
    assert "6.61× as fast with 8 ranks as one rank alone" in spaced(rendered(llama_plan(), 160))


def test_a_budget_that_is_not_kept_is_shown():
    assert "Over the budget of 80 GiB by 25 GiB." in rendered(mesh_plan(), 80)
    plan = dataclasses.replace(mesh_plan(), memory_budget_bytes=2**37)
    assert "Within the budget of 128 GiB, with 23 GiB to spare." in rendered(plan, 80)
    assert "budget" not in rendered(llama_plan(), 80)


def test_names_are_no_markup():
    assert "[bold]0.weight" in rendered(slow_plan(), 80)


def test_an_empty_plan_can_be_shown():
    empty = dataclasses.replace(
        slow_plan(),
        weights=(),
        collectives=(),
        cost=Cost(0.0, 0.0, dataclasses.replace(slow_plan().cost.memory, weights_bytes=0)),
    )
    text = rendered(empty, 80)
    assert "0 tensors, 0 parameters" in text
    assert "Collectives  none" in text


def test_the_whole_page_at_80_columns():
    """The text of a small report, to be read by whoever changes it."""
    lines = [line.rstrip() for line in rendered(slow_plan(), 80).splitlines()]
    assert "\n".join(lines).strip() == SLOW_PAGE.strip()


SLOW_PAGE = """
╭─ autoshard plan ─────────────────────────────────────────────────────────────╮
│ model        Sequential                                                      │
│ mesh         tp=2, 2 ranks of laptop                                         │
│ planned for  inference, search all, at most 1 KiB a rank                     │
│ inputs       unknown                                                         │
│                                                                              │
│ 43.2 µs a forward pass, 1.51 KiB a rank at the peak                          │
│ SLOWER than no sharding at all: 2 ranks together are predicted to take 21.6× │
│ the 2 µs that one rank takes alone.                                          │
╰──────────────────────────────────────────────────────────────────────────────╯

Weights  4 tensors, 81 parameters, 324 B of float32; a rank stores 50.6%

weight          split       shape   a rank  why
───────────────────────────────────────────────
[bold]0.weight  column      8×6       96 B  a
                            → 4×6
[bold]0.bias    column      8         16 B  a
                            → 4
2.weight        row         3×8       48 B  b
                            → 3×4
2.scale         replicated  scalar     4 B  c
  frozen
───────────────────────────────────────────────
in all                               164 B

 a output features split: its input is whole on every rank, so nothing is
   communicated
 b input features split: its input is already split so; the sum costs one
   all-reduce
 c small: splitting it would save 7 KiB and cost a collective

Collectives  1 in a step, 42 µs

collective  where     tensor  count  in all  why
────────────────────────────────────────────────
all_reduce  2            5×3     ×1   42 µs  a
forward       linear    60 B
────────────────────────────────────────────────
in all                                42 µs

 a a sum

Time of a forward pass  predicted  █ compute  ░ communicate, with local copies

plan           step  compute  communicate  relative
──────────────────────────────────────────────────────────────────────
this plan   43.2 µs   1.2 µs        42 µs            █░░░░░░░░░░░░░░░░
replicated     2 µs     2 µs          0 s   0.0463×  █

Memory of a rank  predicted, when most is held

plan        weights  gradients  optimizer  saved  transient      peak
─────────────────────────────────────────────────────────────────────
this plan     140 B        0 B        0 B  800 B      604 B  1.51 KiB
replicated      1 B        0 B        0 B    4 B        2 B       7 B
At most, each at its own time: saved 800 B, transient 604 B.
Over the budget of 1 KiB by 520 B.

Solver  CBC: stopped at the time limit with a gap · objective 43.2 µs · bound
unknown · gap 3.1% · 40 binaries · 96 constraints
"""


# ---- what if --------------------------------------------------------------------------------


def what_if_of(plan: Plan, width: int, *, colour: bool = False) -> str:
    text = rendered(plan, width, colour=colour)
    found = re.search(
        r"(?:\x1b\[[0-9;]*m)?What if.*?(?=(?:\x1b\[[0-9;]*m)?(?:Notes|Solver))", text, re.DOTALL
    )
    return found[0] if found else ""


def test_what_if_at_80_columns():
    lines = [line.rstrip() for line in what_if_of(llama_plan(), 80).splitlines()]
    assert "\n".join(lines).strip() == WHAT_IF.strip()


WHAT_IF = """
What if  the step of this plan, were something else other than planned

                    half of it  as planned  twice it  1% more makes the step
────────────────────────────────────────────────────────────────────────────
bandwidth of links      623 ms      602 ms    592 ms  0.04% shorter
latency of links        601 ms      602 ms    604 ms  0.004% longer
batch (4)               360 ms      602 ms    1.09 s  0.8% longer
sequence (2,048)        360 ms      602 ms    1.09 s  0.8% longer

about 463 ms·batch·sequence + 116 ms + 21.2 ms·batch·sequence/bandwidth +
2.36 ms·latency (each symbol 1 as planned)

changes places at                  where                               both take
────────────────────────────────────────────────────────────────────────────────
bandwidth of links         0.867×  below it, this plan is faster than     605 ms
                                   search all
bandwidth of links          1.24×  above it, fully sharded is faster      598 ms
latency of links            2.38×  above it, this plan is faster than     605 ms
                                   search all
batch               0.271× = 1.08  below it, fully sharded is faster      249 ms
sequence             0.271× = 555  below it, fully sharded is faster      249 ms

the step by batch: f fully sharded
 1.05× as long │                                       ffffffffffffffffff
               │                        fffffffffffffff
     this plan │··················ffffff·································
               │               fff
               │           ffff
               │     ffffff
 0.91× as long │fffff
               └────────────────────────────┴────────────────────────────
                1/64                 as planned (4)                   64×
"""


def test_what_if_numbers_are_those_of_the_sensitivity():
    plan = llama_plan()
    found, text = plan.sensitivity(), what_if_of(plan, 160)
    for even in found.break_evens:
        assert fmt.times(even.at) in text
        assert fmt.seconds(even.step_s) in text
        if even.symbol == "batch":
            assert f"= {fmt.digits(4 * even.at)} " in text
    for symbol in found.elasticities:
        for multiple in (0.5, 2.0):
            assert fmt.seconds(found.at(**{symbol: multiple})) in text


@pytest.mark.parametrize("width", WIDTHS)
def test_what_if_is_as_readable_without_colour(width):
    plain = what_if_of(llama_plan(), width)
    coloured = what_if_of(llama_plan(), width, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    for words in ("f fully sharded", "this plan", "as planned (4)", "1/64", "64×", "as long"):
        assert words in plain
    assert ("the step by bandwidth of links" in plain) is (width >= 140)


def test_the_plot_shows_who_is_faster_where():
    """Left of the break-even batch, at 0.27×, the other plan's marks are below this plan's line."""
    lines = what_if_of(llama_plan(), 80).splitlines()
    rows = [line[16:] for line in lines if line[15:16] == "│"]
    own = next(i for i, line in enumerate(lines) if line.startswith("     this plan │"))
    middle = own - next(i for i, line in enumerate(lines) if line[15:16] == "│")
    columns = {x: y for y, row in enumerate(rows) for x, mark in enumerate(row) if mark == "f"}
    assert len(columns) == len(rows[middle].rstrip())
    even = next(b for b in llama_plan().sensitivity().break_evens if b.symbol == "batch")
    for x, y in columns.items():
        multiple = 64 ** (2 * x / (len(columns) - 1) - 1)
        if abs(math.log(multiple / even.at)) > 1:
            assert (y > middle) == (multiple < even.at), (x, y)


def test_what_if_without_break_evens_says_so():
    plan = llama_plan()
    only = {"replicated": plan.cost.baselines["replicated"]}
    text = what_if_of(
        dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, baselines=only)), 240
    )
    assert "no known plan changes places with this one" in text
    none = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, baselines={}))
    assert "there is no known plan to compare with" in what_if_of(none, 240)


def test_what_if_of_a_plan_without_a_formula_is_left_out():
    assert what_if_of(mesh_plan(), 80) == ""


# ---- explain --------------------------------------------------------------------------------


def test_explain_says_all_of_a_weight():
    assert llama_plan().explain("model.layers.3.mlp.down_proj.weight") == (
        "model.layers.3.mlp.down_proj.weight\n"
        "  split       row: dimension 1 over tp=8\n"
        "  shape       4096×14336 bfloat16, of which a rank holds 4096×1792\n"
        "  memory      14 MiB a rank of 112 MiB in all\n"
        "  why         input features split: its input is already split so; the sum costs one"
        " all-reduce\n"
        "  repeated    32 of 32 alike, model.layers.*.mlp.down_proj.weight\n"
        "  operator    model.layers.*.mlp.down_proj/aten.linear.default#0 ×32: S(2) S(1) -> P\n"
        "  forward     all_reduce on tp after linear, 4×2048×4096, 64 MiB, ×32, 5.89 ms in all:"
        " each rank\n"
        "              holds a share of the sum over the split input features\n"
    )


def test_explain_takes_tied_names_and_groups():
    plan = mesh_plan()
    tied = plan.explain("lm_head.weight")
    assert tied == plan.explain("wte.weight")
    assert "dimension 1 over dp=4, dimension 0 over tp=8" in tied
    assert "tied to     lm_head.weight" in tied
    group = plan.weights[1].group
    assert "dimension 0 over tp=8 in 3 blocks" in plan.explain(group)
    assert "4 are stored otherwise" in spaced(plan.explain(group))
    assert "none: the weight is frozen" in slow_plan().explain("2.scale")


@pytest.mark.parametrize("name", PLANS)
def test_every_weight_can_be_explained(name):
    plan = PLANS[name]()
    for weight in plan.weights:
        text = plan.explain(weight.fqn)
        assert weight.split in text
        assert joined(weight.reason) in joined(text)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("model.layers.3.mlp.dwn_proj.weight", "Did you mean model.layers.3.mlp.down_proj.weight"),
        ("model.layers.3.mlp", "Did you mean model.layers.3.mlp.gate_proj.weight or"),
        ("%", "`autoshard show` lists them."),
    ],
)
def test_explain_of_an_unknown_name_gives_the_nearest(name, fix):
    with pytest.raises(PlanError) as caught:
        llama_plan().explain(name)
    assert caught.value.what == f"The plan has no weight '{name}'."
    assert caught.value.where == "the plan of LlamaForCausalLM, of 291 weights"
    assert caught.value.fix.startswith(fix)


# ---- diff -----------------------------------------------------------------------------------


def test_equal_plans_do_not_differ():
    assert llama_plan().diff(llama_plan()) == ""
    assert llama_plan().diff(Plan.from_json(llama_plan().to_json())) == ""


def variants(plan: Plan) -> dict[str, Plan]:
    """`plan` with each of its fields, and each field of its first records, changed."""

    def changed(value: object) -> object:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int | float):
            return value + 1 if math.isfinite(value) else 0.0
        if isinstance(value, str):
            return value + "x"
        if isinstance(value, tuple) and value and isinstance(value[0], int):
            return (*value[:-1], value[-1] + 1)
        return None

    found = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if (new := changed(value)) is not None:
            found[field.name] = dataclasses.replace(plan, **{field.name: new})
        records = value if isinstance(value, tuple) else (value,)
        if not records or not dataclasses.is_dataclass(records[0]) or field.name == "mesh":
            continue
        first = records[0]
        for inner in dataclasses.fields(first):
            new = changed(getattr(first, inner.name))
            if new is None or not inner.compare:
                continue
            record = dataclasses.replace(first, **{inner.name: new})
            whole = (record, *value[1:]) if isinstance(value, tuple) else record
            found[f"{field.name}.{inner.name}"] = dataclasses.replace(plan, **{field.name: whole})
    return found


@pytest.mark.parametrize("name", PLANS)
def test_every_change_is_told(name):
    plan = PLANS[name]()
    changes = variants(plan)
    assert len(changes) > 30
    for field, other in changes.items():
        assert plan != other
        for text in (plan.diff(other), other.diff(plan)):
            assert text, field
            assert "otherwise" not in text, field
            assert text.endswith("\n"), field


def test_records_that_are_left_out_or_reordered_are_told():
    plan = mesh_plan()
    for field in ("weights", "collectives", "fallbacks", "constraints"):
        fewer = dataclasses.replace(plan, **{field: getattr(plan, field)[1:]})
        backwards = dataclasses.replace(plan, **{field: getattr(plan, field)[::-1]})
        assert plan.diff(fewer)
        assert plan.diff(backwards)


def test_equal_changes_of_repeated_layers_are_one_line():
    plan = llama_plan()

    def whole(weight):
        if "down_proj" not in weight.fqn:
            return weight
        size = weight.stored_bytes * 8
        return dataclasses.replace(
            weight, split="replicated", placements=(I,), local_shape=weight.shape, stored_bytes=size
        )

    other = dataclasses.replace(plan, weights=tuple(map(whole, plan.weights)))
    assert plan.diff(other) == (
        "weights\n"
        "  model.layers.*.mlp.down_proj.weight ×32\n"
        "  - row S(1): 4096×1792 bfloat16 of 4096×14336, 14 MiB a rank\n"
        "  + replicated I: 4096×14336 bfloat16 of 4096×14336, 112 MiB a rank\n"
    )


def test_costs_are_compared_in_percent():
    plan = llama_plan()
    other = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, comm_s=0.0472))
    assert plan.diff(other) == (
        "cost\n"
        "  this plan step: 602 ms → 626 ms (+3.9%)\n"
        "  this plan comm: 23.6 ms → 47.2 ms (+99.9%)\n"
    )


# ---- verification ---------------------------------------------------------------------------


def test_a_verification_that_holds():
    good = Verification(True, 1e-15, 2e-15, 0.0, {"a": 1e-15}, None, 1e-9, 4)
    text = rendered(good, 80)
    assert "✓ On 4 ranks the sharded model computes what the model does." in text
    assert re.search(r"outputs +1\.0e-15 +1\.0e-09 +✓", text)
    assert "✗" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_verification_that_fails_names_the_worst_gradients_and_the_first_node(width):
    gradients = {f"layers.{i}.mlp.weight": 10.0**-i for i in range(14)} | {"q": math.nan}
    first = "layers.0.mlp.down_proj linear_3"
    bad = Verification(False, 1e-3, math.nan, 0.1, gradients, first, 1e-10, 4)
    text = rendered(bad, width)
    assert max(map(cell_len, text.splitlines())) <= max(width, LEAST_WIDTH)
    assert "does NOT compute what the model does" in spaced(text)
    assert f"First node that differs: {first}" in spaced(text)
    named = re.findall(r"^  (\S+) ", text, re.MULTILINE)
    assert named[:3] == ["q", "layers.0.mlp.weight", "layers.1.mlp.weight"]
    assert re.search(r"and 1 more gradient\b", text)
    assert re.search(r"gradients of 15 parameters +nan +1\.0e-10 +✗", text)


# ---- numbers as text ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (fmt.seconds, 0.0, "0 s"), (fmt.seconds, 1.2345, "1.23 s"), (fmt.seconds, 123.4, "123 s"),
        (fmt.seconds, 0.99951, "1 s"), (fmt.seconds, 9.996e-4, "1 ms"),
        (fmt.seconds, 1.31e-3, "1.31 ms"), (fmt.seconds, 4.2e-5, "42 µs"),
        (fmt.seconds, 3e-12, "0.003 ns"), (fmt.seconds, 12345.6, "12346 s"),
        (fmt.seconds, math.inf, "unknown"),
        (fmt.size, 0, "0 B"), (fmt.size, 1023, "1023 B"), (fmt.size, 1024, "1 KiB"),
        (fmt.size, 1536, "1.5 KiB"), (fmt.size, 2**30 - 1, "1 GiB"), (fmt.size, 2**62, "4096 PiB"),
        (fmt.amount, 999_999, "999,999"), (fmt.amount, 8_030_261_248, "8.03 billion"),
        (fmt.percent, 0.0, "0%"), (fmt.percent, 0.0312, "3.1%"), (fmt.percent, 1e-9, "1e-07%"),
        (fmt.percent, 1.0, "100%"), (fmt.percent, math.nan, "unknown"),
        (fmt.times, 6.613, "6.61×"), (fmt.error, 0.0, "0"), (fmt.error, 2.3e-12, "2.3e-12"),
        (fmt.shape, (), "scalar"), (fmt.shape, (4, 2048), "4×2048"),
        (fmt.ranges, (0, 1, 2, 5, 7, 8), "0–2, 5, 7–8"), (fmt.ranges, (), ""),
    ],
)  # fmt: skip
def test_numbers_as_text(show, value, text):
    assert show(value) == text


def test_rates_operators_and_layouts_as_text():
    assert fmt.rate(3.35e12, "B/s") == "3.35 TB/s"
    assert fmt.operator("aten.linear.default") == "linear"
    assert fmt.operator("my.op.out") == "my.op.out"
    assert fmt.rate(math.inf, "B/s") == "unlimited"
    mesh = Mesh.of({"dp": 2, "tp": 4})
    assert fmt.layout((I, I), mesh) == "whole on every rank"
    assert fmt.layout((I, Shard(0, 3)), mesh) == "dimension 0 over tp=4 in 3 blocks"


@given(st.floats(1e-9, 1e9))
def test_a_time_keeps_three_digits(value):
    number, unit = fmt.seconds(value).split()
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(value, rel=0.0051)
    assert unit == "s" or float(number) <= 1000


@given(st.integers(0, 2**60))
def test_a_size_keeps_three_digits(value):
    number, unit = fmt.size(value).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert float(number) * scale == pytest.approx(value, rel=0.0051, abs=0)
