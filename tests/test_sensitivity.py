"""What if: the formulas of a step's time against prices taken anew, and where plans change places."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from models import bert, gpt2, llama, mlp, resnet, vit
from torch import nn

import autoshard
from autoshard.capture import capture
from autoshard.cost.hardware import Hardware, load_hardware
from autoshard.mesh import Mesh
from autoshard.plan_types import Cost, CostTerm, Part, Plan
from autoshard.planner import Decided, Options, baselines, decide, surveyed
from autoshard.planner.price import price
from autoshard.planner.record import cost, record, replicated
from autoshard.planner.scaling import growth, scaling
from autoshard.planner.terms import joined
from autoshard.sensitivity import sensitivity
from autoshard.strategies import derive
from autoshard.what_if import SYMBOLS, crossings, elasticity, narrowed

SLOW_LINKS = "l40s-pcie"


class Priced:
    """A model's plan and its known plans, which can be priced again for other inputs and other hardware."""

    def __init__(self, build, ranks: int, hardware: str | Hardware, **inputs: int) -> None:
        self.build, self.ranks = build, ranks
        self.hardware = load_hardware(hardware)
        options = self.options(self.hardware)
        graph = self.graph(**inputs)
        self.survey = surveyed(graph, options)
        decided = decide(graph, options, self.survey)
        others = baselines(self.survey, options)
        self.plan: Plan = record(self.survey, decided, options, others)
        self.decided = {"": decided, **replicated(decided, self.survey, options.pricer), **others}
        self.inputs = inputs

    def options(self, hardware: Hardware) -> Options:
        return Options(Mesh.of({"tp": self.ranks}), hardware)

    def graph(self, **inputs: int):
        model, kwargs = self.build(**inputs)
        return capture(model, (), kwargs).graph

    def again(self, hardware: Hardware | None = None, **inputs: int) -> dict[str, float]:
        """The step times of the same decisions, taken from the pricer."""
        options = self.options(hardware or self.hardware)
        survey = surveyed(self.graph(**(self.inputs | inputs)), options)
        found = {}
        for name, decided in self.decided.items():
            search = {"megatron": "megatron", "all": "all"}.get(name, "batch")
            search = "tensor" if name in ("", "replicated") else search
            now = derive(survey.folded, options.mesh, search=search, rules=survey.rules)
            choice = []
            for then, at, options_now in zip(
                decided.strategies.choices, decided.choice, now.choices, strict=True
            ):
                choice.append([str(s) for s in options_now].index(str(then[at])))
            problem = price(now, options.pricer, survey, None)
            again = Decided(now, tuple(choice), problem)
            assert problem.possible(again.choice)
            found[name] = cost(again, options.pricer, survey, scaling(survey)).step_s
        return found


def faster_links(hardware: Hardware, by: float) -> Hardware:
    def link(one):
        kinds = tuple((k, rate * by) for k, rate in one.kind_bandwidths_bytes_s)
        return dataclasses.replace(
            one, bandwidth_bytes_s=one.bandwidth_bytes_s * by, kind_bandwidths_bytes_s=kinds
        )

    return dataclasses.replace(
        hardware, intra=link(hardware.intra), inter=link(hardware.inter), name="faster"
    )


def slower_steps(hardware: Hardware, by: float) -> Hardware:
    def link(one):
        return dataclasses.replace(one, latency_s=one.latency_s * by)

    return dataclasses.replace(
        hardware, intra=link(hardware.intra), inter=link(hardware.inter), name="slower"
    )


def decoder(batch: int = 8, sequence: int = 64):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(batch, sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


class Eager(nn.Module):
    """Attention written out: scores, softmax and all."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


def eager(batch: int = 8, sequence: int = 64):
    with torch.device("meta"):
        return Eager(), {"x": torch.zeros(batch, sequence, 128)}


class Wide(nn.Module):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def wide(batch: int = 256):
    with torch.device("meta"):
        return Wide(), {"x": torch.zeros(batch, 1024)}


def profiles() -> list[str]:
    from autoshard.cost.hardware import hardware_names

    return [name for name in hardware_names() if name != "ideal"]


# ---- the terms are the step ------------------------------------------------------------------


@pytest.mark.parametrize("hardware", profiles())
def test_terms_sum_to_the_step_time_of_every_plan(hardware: str) -> None:
    for build in (decoder, wide):
        priced = Priced(build, 4, hardware)
        found = priced.plan.sensitivity()
        for name, known in {"": priced.plan.cost, **priced.plan.cost.baselines}.items():
            assert found.at(name) == pytest.approx(known.step_s, rel=1e-9), name


@pytest.mark.parametrize("build", [mlp, llama, gpt2, bert, vit, resnet])
def test_terms_sum_to_the_step_time_of_every_model(build) -> None:
    model, kwargs = build()
    for search in ("tensor", "all"):
        plan = autoshard.plan(model, 2, (), kwargs, hardware=SLOW_LINKS, search=search)
        found = plan.sensitivity()
        for name, known in {"": plan.cost, **plan.cost.baselines}.items():
            assert found.at(name) == pytest.approx(known.step_s, rel=1e-9), name


# ---- the terms grow as prices do -------------------------------------------------------------


@pytest.fixture(scope="module")
def decoded() -> Priced:
    return Priced(decoder, 4, "cpu-gloo")


@pytest.mark.parametrize("by", [0.02, 0.5, 2.0, 50.0])
def test_other_links_are_priced_as_the_pricer_does(decoded: Priced, by: float) -> None:
    found = decoded.plan.sensitivity()
    for symbol, hardware in (
        ("bandwidth", faster_links(decoded.hardware, by)),
        ("latency", slower_steps(decoded.hardware, by)),
    ):
        for name, step_s in decoded.again(hardware).items():
            assert found.at(name, **{symbol: by}) == pytest.approx(step_s, rel=1e-6), (symbol, name)


@pytest.mark.parametrize(
    "inputs", [{"batch": 4}, {"batch": 32}, {"sequence": 16}, {"sequence": 256}]
)
@pytest.mark.parametrize("build", [decoder, eager], ids=["decoder", "eager"])
@pytest.mark.parametrize("hardware", [SLOW_LINKS, "cpu-gloo"])
def test_other_sizes_are_priced_as_the_pricer_does(build, inputs, hardware) -> None:
    priced = Priced(build, 4, hardware, batch=8, sequence=64)
    found = priced.plan.sensitivity()
    multiples = {name: size / priced.inputs[name] for name, size in inputs.items()}
    for name, step_s in priced.again(**inputs).items():
        assert found.at(name, **multiples) == pytest.approx(step_s, rel=1e-3), name


# ---- elasticities ----------------------------------------------------------------------------


def test_elasticities_are_finite_differences_of_prices(decoded: Priced) -> None:
    found = decoded.plan.sensitivity()
    step_s, eps = decoded.plan.cost.step_s, 1e-3
    for symbol, change in (("bandwidth", faster_links), ("latency", slower_steps)):
        up, down = (decoded.again(change(decoded.hardware, 1 + e))[""] for e in (eps, -eps))
        assert found.elasticities[symbol] == pytest.approx(
            (up - down) / (2 * eps) / step_s, rel=1e-3
        )
    base = Priced(decoder, 4, "h100-sxm", batch=64, sequence=256)
    found, step_s = base.plan.sensitivity(), base.plan.cost.step_s
    for symbol, step in (("batch", 4), ("sequence", 4)):
        size = base.inputs[symbol]
        up, down = (base.again(**{symbol: size + e})[""] for e in (step, -step))
        slope = (up - down) / (2 * step) * size / step_s
        assert found.elasticities[symbol] == pytest.approx(slope, rel=2e-2)
        assert slope > 0.1


def test_elasticities_of_what_a_plan_has_none_of_are_zero() -> None:
    model, kwargs = wide()
    plan = autoshard.plan(model, 2, (), kwargs, constraints={"*": "replicated"})
    found = plan.sensitivity().elasticities
    assert found["bandwidth"] == found["latency"] == found["sequence"] == 0
    assert found["batch"] > 0


def test_an_attention_written_out_grows_with_the_square_of_the_sequence() -> None:
    model, kwargs = eager(batch=2, sequence=4096)
    found = autoshard.plan(model, 2, (), kwargs).sensitivity().elasticities
    assert found["sequence"] == pytest.approx(2, abs=0.2)
    assert found["batch"] == pytest.approx(1, abs=0.1)


# ---- break-evens -----------------------------------------------------------------------------


def test_break_even_bandwidths_change_the_order_of_prices(decoded: Priced) -> None:
    found = [b for b in decoded.plan.sensitivity().break_evens if b.symbol == "bandwidth"]
    assert found
    for even in found:
        here = decoded.again(faster_links(decoded.hardware, even.at))
        assert here[""] == pytest.approx(here[even.plan], rel=1e-6)
        assert here[""] == pytest.approx(even.step_s, rel=1e-6)
        for by in (0.98, 1.02):
            times = decoded.again(faster_links(decoded.hardware, even.at * by))
            assert (times[even.plan] < times[""]) == ((by > 1) == (even.beyond == "above")), even


@pytest.mark.parametrize(
    ("build", "inputs"), [(decoder, {"batch": 32, "sequence": 256}), (wide, {"batch": 8192})]
)
def test_break_even_sizes_change_the_order_of_prices(build, inputs) -> None:
    priced, checked = Priced(build, 4, "h100-sxm", **inputs), 0
    for even in priced.plan.sensitivity().break_evens:
        planned = inputs.get(even.symbol, 0)
        if not 12 <= even.at * planned <= 2**16:
            continue  # in whole multiples of the ranks there is nothing near
        for size, side in (
            (4 * math.floor(even.at * planned * 0.97 / 4), "below"),
            (4 * math.ceil(even.at * planned * 1.03 / 4), "above"),
        ):
            times = priced.again(**{even.symbol: size})
            assert (times[even.plan] < times[""]) == (even.beyond == side), (even, size)
        checked += 1
    assert checked >= 2


def test_the_known_plan_that_wins_beyond_a_break_even_is_what_planning_finds() -> None:
    """Planned again beyond the bandwidth at which replication wins, the plan is replicated."""
    priced = Priced(wide, 4, SLOW_LINKS)
    found = priced.plan.sensitivity()
    even = next(b for b in found.break_evens if (b.symbol, b.plan) == ("bandwidth", "replicated"))
    for by, splits in ((1.1, True), (0.9, False)):
        hardware = faster_links(priced.hardware, even.at * by)
        again = Priced(wide, 4, hardware).plan
        assert any(w.split != "replicated" for w in again.weights) is splits


def hand_made(*terms: CostTerm, **others: tuple[CostTerm, ...]) -> Plan:
    from sample_plans import slow_plan

    plan = slow_plan()
    memory = plan.cost.memory

    def costed(given: tuple[CostTerm, ...]) -> Cost:
        return Cost(
            0.0,
            sum(max(math.fsum(p.seconds for p in o) for o in t.options) for t in given),
            memory,
            terms=given,
        )

    known = {name: costed(given) for name, given in others.items()}
    return dataclasses.replace(plan, cost=dataclasses.replace(costed(terms), baselines=known))


def test_break_evens_are_exact_roots() -> None:
    plan = hand_made(
        CostTerm("max", ((Part(1.0, "launch"), Part(1.0, "bandwidth", 1, 0)),)),
        steady=(CostTerm("max", ((Part(1.5, "memory"),),)),),
        kinked=(CostTerm("max", ((Part(0.5, "launch"),), (Part(0.25, "memory", 2, 0),))),),
    )
    found = {(b.symbol, b.plan): b for b in sensitivity(plan).break_evens}
    assert found["bandwidth", "steady"].at == pytest.approx(2.0)
    assert found["bandwidth", "steady"].beyond == "below"
    assert found["batch", "steady"].at == pytest.approx(0.5)
    # 1 + b = b² / 4 has the root 2 + √8; below √2 the kinked one is its launch alone
    assert found["batch", "kinked"].at == pytest.approx(2 + math.sqrt(8))
    assert found["batch", "kinked"].beyond == "below"
    assert {symbol for symbol, _ in found} == {"bandwidth", "batch"}


def test_a_collective_takes_its_other_algorithm_when_that_is_quicker() -> None:
    options = (
        (Part(1.0, "latency"), Part(4.0, "bandwidth")),
        (Part(3.0, "latency"), Part(1.0, "bandwidth")),
    )
    found = sensitivity(hand_made(CostTerm("min", options)))
    assert found.at() == 4.0
    assert found.at(bandwidth=4) == 2.0
    assert found.at(latency=0.5) == 2.5


def test_an_unknown_symbol_is_refused(decoded: Priced) -> None:
    with pytest.raises(ValueError, match="width"):
        decoded.plan.sensitivity().at(width=2)


def test_the_formula_is_in_the_four_symbols(decoded: Priced) -> None:
    found = decoded.plan.sensitivity()
    assert {str(s) for s in found.step_s.free_symbols} == set(SYMBOLS)
    values = dict.fromkeys(found.step_s.free_symbols, 1.0)
    assert float(found.step_s.subs(values)) == pytest.approx(decoded.plan.cost.step_s, rel=1e-9)


def test_plain_numbers_agree_with_the_formulas(decoded: Priced) -> None:
    cost, found = decoded.plan.cost, decoded.plan.sensitivity()
    for symbol in SYMBOLS:
        assert elasticity(cost, symbol) == pytest.approx(found.elasticities[symbol], rel=1e-9)
    known = {name: other for name, other in found.costs.items() if name}
    plain = [(n, narrowed(cost, known[n], c, 1e-6)) for n, c in crossings(cost, known)]
    assert len(plain) > 4
    for (name, crossing), even in zip(plain, found.break_evens, strict=True):
        assert (name, crossing.symbol, crossing.beyond) == (even.plan, even.symbol, even.beyond)
        assert crossing.at == pytest.approx(even.at, rel=1e-5)


# ---- the pieces ------------------------------------------------------------------------------


def test_growth_is_the_polynomial() -> None:
    def value(by):
        b, s = by
        return 3.0 + 5.0 * b * s**2 + 0.5 * b

    found = growth(value, (1, 2), 4)
    assert found == {
        (0, 0): pytest.approx(3.0),
        (1, 0): pytest.approx(0.5),
        (1, 2): pytest.approx(5.0),
    }


def test_growth_of_what_ranks_share_unevenly_does_not_run_away() -> None:
    found = growth(lambda by: -(-5 * by[0] // 2), (1, 0), 2)  # 5 rows on 2 ranks: 3 as planned
    assert sum(found.values()) == 3
    assert sum(c * 64 ** p[0] for p, c in found.items()) == pytest.approx(3 * 64, rel=1e-6)


def test_joined_terms_are_worth_what_they_were() -> None:
    def kernel(scale: float) -> CostTerm:
        return CostTerm("max", ((Part(3e-6, "launch"),), (Part(2e-6 * scale, "memory", 1, 1),)))

    found = joined([(2, kernel(1.0)), (3, kernel(1.0)), (1, kernel(4.0)), (1, kernel(0.0))])
    total = math.fsum(max(o[0].seconds for o in t.options) for t in found)
    assert total == pytest.approx(5 * 3e-6 + 8e-6 + 3e-6, rel=1e-9)
    assert len(found) == 3
