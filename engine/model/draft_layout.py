"""Which tensors a draft holds beside its decoder layers, and the geometry of those."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.tensor_specs import FLOATS, Layout, Role, TensorSpec, fp32, head_mixing, matrix


def draft_geometry(config: ModelConfig) -> ModelConfig:
    """The geometry of a draft stage: the backbone's, with its own experts where config.json names them.

    raises  ConfigError
    """
    if config.dspark is None:
        return config
    experts = config.dspark.n_routed_experts or config.n_routed_experts
    chosen = config.dspark.num_experts_per_tok or config.num_experts_per_tok
    if not 0 < chosen <= experts:
        raise ConfigError(f"config.json: the draft chooses {chosen} of {experts} experts")
    return replace(config, n_routed_experts=experts, num_experts_per_tok=chosen)


def classic_extras(config: ModelConfig, layout: Layout, at: str) -> dict[str, TensorSpec]:
    """What a classic MTP module holds beside its layer."""
    width = config.hidden_size
    tensors = head_mixing(config, at)
    for name in ("e_proj", "h_proj"):
        tensors |= matrix(f"{at}{name}.weight", layout.dense, width, width)
    return tensors | {f"{at}{name}.weight": fp32(width) for name in ("enorm", "hnorm", "norm")}


def dspark_extras(config: ModelConfig, layout: Layout) -> dict[str, TensorSpec]:
    """What DSpark stages hold beside their layers. raises CheckpointError."""
    dspark = config.dspark
    if dspark is None:
        raise CheckpointError("DSpark stages need the dspark_* fields of config.json")
    width, rank, taps = config.hidden_size, dspark.markov_rank, len(dspark.target_layer_ids)
    last = f"mtp.{layout.stages - 1}."
    tensors = matrix("mtp.0.main_proj.weight", layout.dense, width, taps * width)
    tensors |= {"mtp.0.main_norm.weight": fp32(width), f"{last}norm.weight": fp32(width)}
    tensors |= head_mixing(config, last)
    markov = {"markov_w1": (config.vocab_size, rank), "markov_w2": (config.vocab_size, rank)}
    if dspark.markov_head_type == "gated":
        markov["gate_proj"] = (rank, width + rank)
    if dspark.markov_head_type == "rnn":
        markov["joint_proj"] = (3 * rank, 2 * rank + width)
    for name, shape in markov.items():
        tensors[f"{last}markov_head.{name}.weight"] = TensorSpec(shape, FLOATS, Role.MATRIX)
        if name.endswith("_proj"):
            tensors[f"{last}markov_head.{name}.bias"] = fp32(shape[0])
    if dspark.has_confidence:
        shape = (1, width + rank * dspark.confidence_with_markov)
        tensors[f"{last}confidence_head.proj.weight"] = TensorSpec(shape, FLOATS, Role.MATRIX)
    return tensors
