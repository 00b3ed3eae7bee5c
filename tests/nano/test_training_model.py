"""The training model computes the same function as transformers' DeepSeek-V4, and so do its gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from engine.model.names import from_transformers
from training.geometry import Geometry, config_json
from training.model import Model
from training.naming import checkpoint_name, from_checkpoint

SMALL = replace(
    Geometry(),
    vocab_size=512,
    hidden_size=128,
    head_dim=128,
    q_lora_rank=64,
    o_lora_rank=64,
    expert_width=64,
    compress_ratios=(0, 4, 128, 4),
    num_hash_layers=1,
    index_heads=32,
    index_topk=16,
)
LENGTH = 384


@pytest.fixture(scope="module")
def peer() -> DeepseekV4ForCausalLM:
    """transformers' model of the same shape, with every trivial parameter randomised."""
    fields = config_json(SMALL, 0, 1)
    fields["compress_ratios"] = list(SMALL.compress_ratios)
    fields["rope_parameters"] = {**fields.pop("rope_scaling"), "rope_type": "yarn"}  # type: ignore[dict-item]
    for key in ("quantization_config", "expert_dtype", "torch_dtype", "architectures"):
        fields.pop(key)
    torch.manual_seed(1)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.stack([torch.randperm(SMALL.num_experts)[:2] for _ in range(len(tensor))]))
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.5 if tensor.ndim < 2 else tensor.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def ours(peer: DeepseekV4ForCausalLM) -> Model:
    """The training model with the peer's weights."""
    model = Model(SMALL)
    from_checkpoint(model, {name: t.clone() for name, t in from_transformers(peer.state_dict()).items()})
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Two rows that cross c4 and c128 windows."""
    return torch.randint(0, SMALL.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def test_logits_with_top_k_selection_equal_transformers(
    peer: DeepseekV4ForCausalLM, ours: Model, ids: Tensor
) -> None:
    """Of 96 entries at the end of a row, 16 are selected."""
    with torch.no_grad():
        expected = peer(ids, use_cache=False).logits
        torch.testing.assert_close(ours.logits(ids, "select"), expected, atol=1e-4, rtol=1e-4)


def test_gradients_of_the_language_loss_equal_transformers(
    peer: DeepseekV4ForCausalLM, ours: Model, ids: Tensor
) -> None:
    """Also shows that the indexer gets none from it."""
    labels = torch.roll(ids, -1, 1)
    peer.zero_grad()
    logits = peer(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours.zero_grad()
    ours(ids, labels, "select")[0].mean().backward()
    wanted = from_transformers({n: p.grad for n, p in peer.named_parameters() if p.grad is not None})
    for name, parameter in ours.named_parameters():
        target = checkpoint_name(name)
        if ".indexer." in name:
            assert parameter.grad is None
            continue
        stack = [wanted[target.format(i)] for i in range(len(parameter))] if "{}" in target else None
        expected = torch.stack(stack) if stack else wanted[target]
        assert parameter.grad is not None
        error = (parameter.grad - expected).norm() / expected.norm().clamp_min(1e-8)
        assert error < 1e-3, f"{name}: {error}"
