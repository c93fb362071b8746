"""megatron-core's `MoELayer`, with its own router and experts: over the flex dispatcher and the drop-in, against the
same layer over its own all-to-all dispatcher, and against a dense layer."""

import contextlib
import importlib

import torch
import torch.distributed as dist
from common import Layer, close, device, group_of, on_path, own_group, replaced
from gpu_common import is_gpu
from with_megatron import cuda_of_the_host, splits_as_lists, tokens_of

STEPS, BATCHES = 15, 3
EXPERTS, HIDDEN, TOPK = 8, 32, 3
RATE, DEVIATION = 0.1, 0.2
# Settings of each case, besides a softmax over all experts.
CASES = {
    "plain": {},
    "sigmoid and a bias of experts": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "groups of experts": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "loss that balances": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "shared expert": {"moe_shared_expert_intermediate_size": 40},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


@contextlib.contextmanager
def as_on_a_gpu():
    """Inside, the layer finds what it asks of torch.cuda, also without a GPU, and its small functions run as they are:
    inductor takes a minute to compile them."""
    with cuda_of_the_host(), torch.compiler.set_stance("force_eager"):
        if is_gpu():
            yield
            return
        state = torch.empty(0, dtype=torch.uint8)
        with replaced(torch.cuda.random, get_rng_state=lambda device: state):
            yield


def groups_of(layer):
    """Ranks share experts, and nothing else."""
    groups = importlib.import_module("megatron.core.process_groups_config").ProcessGroupCollection()
    for name in ("tp", "pp", "cp", "tp_cp", "tp_dp_cp", "expt_tp", "expt_dp"):
        setattr(groups, name, own_group())
    groups.ep = groups.tp_ep = layer.group
    return groups


def is_of_an_expert(name):
    return ".local_experts." in name


def layer_of(layer, dispatcher, options):
    """Megatron's layer as its models make it. All ranks have one router, and each has experts of its own; another
    layer of a rank begins with the same weights."""
    config = importlib.import_module("megatron.core.transformer.transformer_config")
    specs = importlib.import_module("megatron.core.models.gpt.moe_module_specs")
    settings = {
        "num_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": HIDDEN,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "expert_model_parallel_size": layer.ranks,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "init_method_std": DEVIATION,
    }
    make = specs.get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(17)
    made = make(
        config=config.TransformerConfig(**(settings | options)),
        layer_number=1,
        pg_collection=groups_of(layer),
    )
    draw = torch.Generator().manual_seed(layer.me)
    for name, parameter in made.named_parameters():
        if is_of_an_expert(name):
            parameter.data = torch.randn(parameter.shape, generator=draw) * DEVIATION
    return made.to(device())


def with_lists(made):
    """The oracle's dispatcher, which reads its split sizes from arrays of numpy: torch's CPU tensors stay what they
    are."""
    dispatcher = made.token_dispatcher
    preprocess = dispatcher.dispatch_preprocess

    def preprocess_with_lists(*arguments):
        results = preprocess(*arguments)
        splits_as_lists(dispatcher)
        return results

    dispatcher.dispatch_preprocess = preprocess_with_lists
    return made


def train(layer, made):
    """The outputs, input gradients and losses of all steps, and the parameters after them."""
    draw = torch.Generator().manual_seed(7)
    wanted = (torch.randn(HIDDEN, HIDDEN, generator=draw) / HIDDEN**0.5).to(device())
    outputs, losses = [], []
    for step in range(STEPS):
        batch = step % BATCHES
        # Megatron's router takes no batch without tokens.
        x, _, _ = layer.inputs(max(1, tokens_of(layer, batch)), batch)
        x.requires_grad_()
        out, _ = made(x[:, None])
        count = layer.sum_of_ranks(torch.tensor(len(x), device=device()))
        loss = (out[:, 0] - torch.tanh(x.detach() @ wanted)).square().sum() / count
        loss.backward()
        outputs += [out.detach(), x.grad]
        losses.append(layer.sum_of_ranks(loss))
        for name, parameter in made.named_parameters():
            gradient = parameter.grad
            if not is_of_an_expert(name):
                gradient = layer.sum_of_ranks(gradient)
            parameter.data -= RATE * gradient
            parameter.grad = None
    return outputs, torch.stack(losses), dict(made.named_parameters())


def experts_of_all_ranks(layer, made):
    """The two weights of every expert; of a layer without a shared one."""
    pairs = []
    for weights in ("linear_fc1.weight", "linear_fc2.weight"):
        named = made.named_parameters()
        own = torch.stack([one.detach() for name, one in named if name.endswith(weights)])
        gathered = [torch.empty_like(own) for _ in range(layer.ranks)]
        dist.all_gather(gathered, own, group=layer.group)
        pairs.append(torch.cat(gathered))
    return list(zip(*pairs, strict=True))


def dense(layer, made, x):
    """The layer's output without a dispatcher: the router is Megatron's, and every token goes through all experts."""
    probs, chosen = made.route(x[:, None])
    probs = torch.where(chosen, probs, 0)
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(experts_of_all_ranks(layer, made)):
        gate, value = (x @ first.T).chunk(2, 1)
        y = (torch.nn.functional.silu(gate) * value) @ second.T
        out = out + probs[:, expert, None].to(x.dtype) * y
    return out


def layer_trains_as_over_its_own_all_to_all(world, port, size, folder):
    """Kinds of routers, a shared expert, and recomputation."""
    on_path(folder)
    layer = Layer(group_of(world, port, size), EXPERTS, HIDDEN, TOPK, seed=12)
    with as_on_a_gpu():
        for name, options in CASES.items():
            made = layer_of(layer, "flex", options)
            oracle = with_lists(layer_of(layer, "alltoall", options))
            if name == "plain":
                x, _, _ = layer.inputs(7)
                close(made(x[:, None])[0][:, 0], dense(layer, made, x), 1e-5)
            found, losses, parameters = train(layer, made)
            expected, of_oracle, its_parameters = train(layer, oracle)
            # The first step is without what training has carried on: docs/semantics.md.
            for one, other in zip(found[:2], expected[:2], strict=True):
                close(one, other, 1e-5)
            close(losses, of_oracle, 1e-4)
            for one, parameter in parameters.items():
                close(parameter, its_parameters[one], 1e-3)
            assert losses[-BATCHES:].mean() < 0.8 * losses[:BATCHES].mean(), (name, losses)
