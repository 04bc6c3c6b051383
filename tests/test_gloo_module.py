"""The sharded module on real gloo processes: state, accumulation, agreement of the ranks, compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gpt2, llama, mlp, resnet, t5, to_double
from processes import run_ranks
from test_sharded_module import loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import AutoshardError, MeshError, PlanError, ShardedModule, VerifyError

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def shard(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> ShardedModule:
    world = None if "mesh" in options else dist.get_world_size()
    return autoshard.autoshard(model, world, kwargs=kwargs, **{"hardware": "ideal", **options})


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_trains_alike(model: nn.Module, sharded: ShardedModule, kwargs: dict[str, Any]) -> None:
    wanted, found = model(**kwargs), sharded(**kwargs)
    torch.testing.assert_close(loss_of(found).detach(), loss_of(wanted).detach())
    for module, out in ((model, wanted), (sharded, found)):
        module.zero_grad()
        loss_of(out).backward()
    assert_same_gradients(model, sharded)


def assert_same_gradients(model: nn.Module, sharded: ShardedModule) -> None:
    ours = dict(sharded.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(ours[name].grad), parameter.grad, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- parameters and state -----------------------------------------------------------------------


def parameters() -> None:
    """DTensors of the plan's placements, ties kept, the original's order, memory of their own."""
    for build in (gpt2, t5):
        model, kwargs = build()
        sharded = shard(model, kwargs)
        assert list(sharded.state_dict()) == list(model.state_dict())
        mine = dict(sharded.named_parameters(remove_duplicate=False))
        theirs = dict(model.named_parameters(remove_duplicate=False))
        assert list(mine) == list(theirs)
        for weight in sharded.plan.weights:
            assert len({id(mine[fqn]) for fqn in weight.fqns}) == 1
            parameter = mine[weight.fqn]
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter, nn.Parameter)
            assert tuple(parameter.shape) == weight.shape
            assert tuple(parameter.to_local().shape) == weight.local_shape
            assert parameter.to_local().is_contiguous()
            assert torch.equal(parameter.full_tensor(), theirs[weight.fqn])
        assert any(w.split != "replicated" for w in sharded.plan.weights)


def state() -> None:
    """Whole and sharded state dicts, of another split too; strided shards among them."""
    model, kwargs = to_double(gpt2())
    sharded = shard(model, kwargs)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
    sharded.load_state_dict(changed.state_dict())
    assert_trains_alike(changed, sharded, kwargs)
    full = sharded.full_state_dict()
    assert list(full) == list(changed.state_dict())
    for name, value in changed.state_dict().items():
        assert torch.equal(full[name], value), name
    other = shard(model, kwargs, plan=sharded.plan)
    other.load_state_dict(sharded.state_dict())
    assert_trains_alike(changed, other, kwargs)
    replicated = shard(model, kwargs, constraints={"*": "replicated"})
    replicated.load_state_dict(sharded.state_dict())
    assert_trains_alike(changed, replicated, kwargs)
    other = shard(model, kwargs, plan=sharded.plan)
    other.load_state_dict(replicated.state_dict())
    assert_trains_alike(changed, other, kwargs)
    with pytest.raises(RuntimeError, match=r"size mismatch for transformer\.wte\.weight"):
        sharded.load_state_dict({**full, "transformer.wte.weight": torch.zeros(3, 3)})
    copied = copy.deepcopy(sharded)
    assert copied.lm_head.weight is copied.transformer.wte.weight
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    assert_trains_alike(changed, copied, kwargs)


def training() -> None:
    """Accumulation, zeroed gradients, hooks, autograd.grad, frozen weights, modes, shapes."""
    model, kwargs = to_double(llama())
    sharded = shard(model, kwargs)
    for set_to_none in (True, False):
        for module in (model, sharded):
            module.zero_grad(set_to_none=set_to_none)
            for ids in (kwargs["input_ids"], kwargs["input_ids"].flip(0)):
                loss_of(module(**{**kwargs, "input_ids": ids})).backward()
        assert_same_gradients(model, sharded)
    seen: list[Any] = []
    name, parameter = next((n, p) for n, p in sharded.named_parameters() if "q_proj" in n)
    handles = [
        parameter.register_hook(lambda g: seen.append(g.placements)),
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements)),
    ]
    assert_trains_alike(model, sharded, kwargs)
    assert seen == [parameter.placements] * 2, name
    for handle in handles:
        handle.remove()
    found = torch.autograd.grad(loss_of(sharded(**kwargs)), list(sharded.parameters()))
    for gradient, (name, parameter) in zip(found, model.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(gradient), parameter.grad, msg=lambda m, n=name: f"{n}: {m}"
        )
    for module in (model, sharded):
        module.zero_grad()
        module.get_submodule("model.layers.0.mlp").requires_grad_(False)
    for parameter in sharded.model.layers._modules["0"].mlp.parameters():
        assert not parameter.requires_grad
    wanted, out = loss_of(model(**kwargs)), loss_of(sharded(**kwargs))
    wanted.backward()
    out.backward()
    for (name, parameter), ours in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert (parameter.grad is None) == (ours.grad is None), name
    for module in (model, sharded):
        module.requires_grad_(True)
        module.eval()
    cut = {**kwargs, **{n: kwargs[n][:3, :7] for n in ("input_ids", "labels")}}
    assert_trains_alike(model, sharded, cut)
    with torch.no_grad():
        torch.testing.assert_close(sharded(**kwargs).logits, model(**kwargs).logits)
    with torch.inference_mode():
        torch.testing.assert_close(sharded(**kwargs).logits, model(**kwargs).logits)


def more_training() -> None:
    """Input gradients, batch norm's buffers, gradients of gradients, a moved optimizer, another dtype."""
    model, kwargs = to_double(resnet())
    sharded = shard(model, kwargs, search="all")
    for training in (True, False):
        for module in (model, sharded):
            module.train(training)
        assert_trains_alike(model, sharded, kwargs)
    buffers = dict(sharded.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(whole(buffers[name]), buffer)
    model, kwargs = to_double(mlp())
    sharded = shard(model, kwargs)
    slopes = []
    for module in (model, sharded):
        x = kwargs["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(module(x=x)), x, create_graph=True)
        weights = list(module.parameters())[:2]
        slopes.append([slope.detach(), *map(whole, torch.autograd.grad((slope**2).sum(), weights))])
    for ours, theirs in zip(slopes[1], slopes[0], strict=True):
        torch.testing.assert_close(ours, theirs)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=True) for m in (reference, model)]
    for module, optimizer in zip((reference, model), optimizers, strict=True):
        loss_of(module(**kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = shard(model, kwargs)
    sharded.rebind(optimizers[1])
    for module, optimizer in zip((reference, sharded), optimizers, strict=True):
        loss_of(module(**kwargs)).backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs)
    for module in (sharded, reference):
        module.float()
    x = kwargs["x"].float()
    torch.testing.assert_close(sharded(x=x), reference(x=x))


def clipping() -> None:
    """`clip_grad_norm_` over replicated, sharded and strided gradients gives the unsharded norm."""
    model, kwargs = to_double(gpt2())
    sharded = shard(model, kwargs)
    placements = {str(p.placements) for p in sharded.parameters()}
    assert len(placements) > 2, placements
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (True, False):
            for module in (model, sharded):
                module.zero_grad()
                loss_of(module(**kwargs)).backward()
            norms = [
                nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
                for m in (model, sharded)
            ]
            torch.testing.assert_close(whole(norms[1]), norms[0])
            again = sharded.clip_grad_norm_(10.0, norm_type)
            torch.testing.assert_close(again, norms[0].new_tensor(0.1), rtol=1e-4, atol=0)
            assert_same_gradients(model, sharded)


@pytest.mark.parametrize("job", [parameters, state, training, more_training, clipping])
@pytest.mark.parametrize("size", [2, 4])
def test_the_module(job: Any, size: int) -> None:
    run_ranks(job, size)


# --- ranks that disagree ------------------------------------------------------------------------


def text_of(error: AutoshardError) -> str:
    return str(error)


def different_plans() -> str:
    model, kwargs = mlp()
    search = "tensor" if dist.get_rank() == 0 else "all"
    with pytest.raises(PlanError) as raised:
        shard(model, kwargs, search=search)
    return text_of(raised.value)


def different_models() -> str:
    model, kwargs = mlp()
    if dist.get_rank():
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
        kwargs = {"input": kwargs["x"]}
    with pytest.raises(PlanError) as raised:
        shard(model, kwargs)
    return text_of(raised.value)


def different_constraints() -> str:
    model, kwargs = mlp()
    split = {"net.0.weight": "column" if dist.get_rank() == 0 else "row"}
    with pytest.raises(PlanError) as raised:
        shard(model, kwargs, constraints=split)
    return text_of(raised.value)


def different_inputs() -> list[str]:
    model, kwargs = llama()
    sharded = shard(model, kwargs)
    texts = []
    labels = kwargs["labels"] + dist.get_rank()
    with pytest.raises(VerifyError) as raised:
        sharded(**{**kwargs, "labels": labels})
    texts.append(text_of(raised.value))
    sharded(**kwargs)  # the ranks are still in step
    sharded(**{**kwargs, "labels": labels})  # later calls are not compared …
    sharded.check_inputs = "always"  # … unless asked for
    with pytest.raises(VerifyError) as raised:
        sharded(**{**kwargs, "labels": labels})
    texts.append(text_of(raised.value))
    sharded.check_inputs = "first"
    size = 2 + dist.get_rank()
    with pytest.raises(VerifyError) as raised:
        sharded(**{**kwargs, **{n: kwargs[n][:size] for n in ("input_ids", "labels")}})
    texts.append(text_of(raised.value))
    with pytest.raises(VerifyError) as raised:
        sharded(kwargs["input_ids"][:1], logits_to_keep=1 + dist.get_rank(), use_cache=False)
    texts.append(text_of(raised.value))
    return texts


def different_seeds() -> str:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    x = torch.ones(4, 8)
    torch.manual_seed(0)
    sharded = autoshard.autoshard(model, dist.get_world_size(), (x,), hardware="ideal")
    torch.manual_seed(dist.get_rank())
    sharded.eval()
    torch.testing.assert_close(sharded(x), model.eval()(x))  # nothing is drawn
    sharded.train()
    with pytest.raises(VerifyError) as raised:
        sharded(x)
    torch.manual_seed(3)
    found = [sharded(x).detach() for _ in range(2)]
    assert not torch.equal(found[0], found[1])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    for other in everyone:
        torch.testing.assert_close(other, found, rtol=0, atol=0)
    return text_of(raised.value)


def test_ranks_with_different_seeds() -> None:
    for text in run_ranks(different_seeds, 2):
        assert "have different random states" in text
        assert "torch.manual_seed" in text


def test_ranks_with_different_plans() -> None:
    first, second = run_ranks(different_plans, 2)
    assert first.startswith("The ranks have different plans. From rank 0 (-) to rank 1 (+):")
    assert second.startswith("The ranks have different plans. From rank 1 (-) to rank 0 (+):")
    assert "search: tensor → all" in first
    assert "fix:   Give every rank the same model" in first


def test_ranks_with_different_models() -> None:
    first, _ = run_ranks(different_models, 2)
    assert "Mlp" in first
    assert "Sequential" in first


def test_ranks_with_different_constraints() -> None:
    first, _ = run_ranks(different_constraints, 2)
    assert "net.0.weight" in first
    assert "column" in first
    assert "row" in first


def test_ranks_given_different_batches() -> None:
    for labels, again, shapes, plain in run_ranks(different_inputs, 2):
        for text in (labels, again):
            assert text.startswith("The ranks were given different inputs: labels.\n")
            assert "int64[4, 16] #" in text
            assert "on rank 0" in text
        assert "different inputs: input_ids, labels." in shapes
        assert "int64[2, 16]" in shapes
        assert "int64[3, 16]" in shapes
        assert "different inputs: logits_to_keep." in plain


# --- meshes -------------------------------------------------------------------------------------


def meshes() -> None:
    model, kwargs = to_double(mlp())
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("model",))
    sharded = shard(model, kwargs, mesh=mesh, search="tensor")
    assert next(sharded.parameters()).device_mesh is mesh
    assert_trains_alike(model, sharded, kwargs)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = shard(model, kwargs, mesh=pairs["tp"], search="tensor")
    assert sharded.plan.mesh.size == 2
    assert isinstance(next(sharded.parameters()), DTensor)
    assert_trains_alike(model, sharded, kwargs)
    x = kwargs["x"] + pairs["dp"].get_local_rank()  # each pair has a batch of its own
    torch.testing.assert_close(sharded(x=x), model(x=x))
    with pytest.raises(MeshError, match="has 2 axes"):
        shard(model, kwargs, mesh=pairs)
    plan = autoshard.plan(model, 4, kwargs=kwargs, hardware="ideal")
    with pytest.raises(MeshError, match="The plan is for the mesh tp=4"):
        shard(model, kwargs, mesh=pairs["tp"], plan=plan)
    sharded = shard(model, kwargs, mesh=mesh, plan=plan)
    assert_trains_alike(model, sharded, kwargs)
    simulated = autoshard.autoshard(model, 3, kwargs=kwargs, hardware="ideal")
    assert not isinstance(next(simulated.parameters()), DTensor)  # no world of 3: in this process
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    if dist.get_rank() < 2:
        assert_trains_alike(model, shard(model, kwargs, mesh=half, search="tensor"), kwargs)


def one_rank() -> None:
    model, kwargs = to_double(mlp())
    sharded = shard(model, kwargs)
    assert sharded.plan.collectives == ()
    assert_trains_alike(model, sharded, kwargs)


def from_meta() -> None:
    """A model that was never whole anywhere: planned on meta, given memory and weights afterwards."""
    model, kwargs = mlp()
    with torch.device("meta"):
        empty, _ = mlp()
    sharded = shard(empty, kwargs)
    assert all(p.to_local().is_meta for p in sharded.parameters())
    sharded.to_empty(device="cpu")
    sharded.load_state_dict(model.state_dict())
    assert_trains_alike(model, sharded, kwargs)


def test_meshes() -> None:
    run_ranks(meshes, 4)


def test_one_rank() -> None:
    run_ranks(one_rank, 1)


def test_a_model_on_the_meta_device() -> None:
    run_ranks(from_meta, 2)


# --- products and their collectives -------------------------------------------------------------


def products() -> None:
    """Megatron's plan for a Llama is two operators a block, and sound where autograd takes other ways."""
    model, kwargs = to_double(llama(layers=2))
    pinned = dict.fromkeys(("*embed_tokens.weight", "*norm.weight", "lm_head.weight"), "replicated")
    pinned |= dict.fromkeys(("*q_proj.weight", "*up_proj.weight"), "column")
    sharded = shard(model, kwargs, search="tensor", hardware="cpu-gloo", constraints=pinned)
    ours = [n for n in sharded.graph_module.graph.nodes if "autoshard" in str(n.target)]
    names = [str(n.target).split(".")[1] for n in ours]
    assert names == ["column_products", "row_product"] * 4
    assert [len(n.args[1]) for n in ours if "column" in str(n.target)] == [3, 2, 3, 2]
    assert_trains_alike(model, sharded, kwargs)
    for module in (model, sharded):
        module.zero_grad()
        for part in ("self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
            module.get_submodule(f"model.layers.0.{part}").weight.requires_grad_(False)
        loss_of(module(**kwargs)).backward()
    for (name, wanted), found in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert (wanted.grad is None) == (found.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(whole(found.grad), wanted.grad)


def autocast() -> None:
    """Under autocast around the call, products run in bfloat16, as the model's do."""
    model, kwargs = mlp()
    sharded = shard(model, kwargs)
    slopes = []
    for module in (model, sharded):
        with torch.autocast("cpu", torch.bfloat16):
            out = module(**kwargs)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        slopes.append([whole(p.grad) for p in module.parameters()])
    for found, wanted in zip(slopes[1], slopes[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("job", [products, autocast])
def test_products(job: Any) -> None:
    run_ranks(job, 2)


# --- torch.compile ------------------------------------------------------------------------------


def compiled(search: str) -> None:
    model, kwargs = to_double(llama(layers=1))
    sharded = shard(model, kwargs, search=search)
    names = {str(n.target) for n in sharded.graph_module.graph.nodes}
    assert any(name.startswith("autoshard.") for name in names)
    whole_module = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        wanted, found = model(**kwargs), whole_module(**kwargs)
        torch.testing.assert_close(found.logits, wanted.logits)
        for module, out in ((model, wanted), (sharded, found)):
            module.zero_grad()
            loss_of(out).backward()
        assert_same_gradients(model, sharded)


@pytest.mark.parametrize("search", ["tensor", "all"])
def test_torch_compile(search: str) -> None:
    run_ranks(compiled, 2, search)
