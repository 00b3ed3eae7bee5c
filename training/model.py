"""The training implementation of DeepSeek-V4: whole rows, no cache, compiled layer by layer."""

from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.attention import Attention, Norm, rotation_tables
from training.experts import Experts
from training.geometry import Geometry
from training.sinkhorn import sinkhorn

Anything = TypeVar("Anything", bound=nn.Module)

MAX_LENGTH = 2048
STAGES = ("dense", "index", "select")


class StreamMix(nn.Module):
    """Manifold-constrained hyper-connection: collapses the streams before a sub-block."""

    def __init__(self, geometry: Geometry, place: int) -> None:
        super().__init__()
        g = self.geometry = geometry
        hc = g.hc_mult
        self.fn = nn.Parameter(torch.empty((2 + hc) * hc, hc * g.hidden_size))
        # Each sub-block starts by reading mostly one stream and by keeping the streams apart.
        read = torch.full((hc,), -1.5)
        read[place % hc] = 1.5
        self.base = nn.Parameter(torch.cat((read, torch.zeros(hc), 4 * torch.eye(hc).flatten())))
        self.scale = nn.Parameter(torch.full((3,), 0.1))

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sub-block input [T, H], post [T, hc] and comb [T, hc, hc] (float32) of streams [T, hc, H]."""
        g = self.geometry
        hc = g.hc_mult
        z = streams.flatten(-2)
        mean_square = z.float().square().mean(-1, keepdim=True)
        mix = F.linear(z, self.fn.to(z.dtype)).float() * torch.rsqrt(mean_square + g.rms_norm_eps)
        pre = torch.sigmoid(mix[:, :hc] * self.scale[0] + self.base[:hc]) + g.hc_eps
        post = 2 * torch.sigmoid(mix[:, hc : 2 * hc] * self.scale[1] + self.base[hc : 2 * hc])
        logits = (mix[:, 2 * hc :] * self.scale[2] + self.base[2 * hc :]).view(-1, hc, hc)
        comb = sinkhorn(logits, g.hc_sinkhorn_iters, g.hc_eps)
        return (pre[..., None] * streams.float()).sum(1).to(streams.dtype), post, comb


def spread(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sub-block, [T, hc, H]: stream k is post_k * output + sum_j comb_jk * stream_j."""
    mixed = (comb[..., None] * streams.float()[:, :, None]).sum(1)
    return (post[..., None] * output.float()[:, None] + mixed).to(streams.dtype)


class SubBlocks(nn.Module):
    """Attention and experts, each between a collapse and a spread of the streams.

    index  of the layer or stage    ratio  of its compressor    hashed  experts are chosen by the token
    """

    def __init__(self, geometry: Geometry, index: int, ratio: int, hashed: bool) -> None:
        super().__init__()
        g = geometry
        self.attn_norm = Norm(g.hidden_size, g.rms_norm_eps)
        self.ffn_norm = Norm(g.hidden_size, g.rms_norm_eps)
        self.hc_attn = StreamMix(g, 2 * index)
        self.hc_ffn = StreamMix(g, 2 * index + 1)
        self.attn = Attention(g, ratio)
        self.ffn = Experts(g, hashed)

    def expert_half(self, streams: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams after the experts, and their loads."""
        u, post, comb = self.hc_ffn.collapse(streams)
        out, load = self.ffn(self.ffn_norm(u), ids.flatten())
        return spread(out, streams, post, comb), load


class Layer(SubBlocks):
    """A layer of the backbone, over whole rows."""

    def __init__(self, geometry: Geometry, index: int) -> None:
        super().__init__(geometry, index, geometry.compress_ratios[index], index < geometry.num_hash_layers)

    def forward(
        self, streams: Tensor, ids: Tensor, tables: dict[str, Tensor], indexed: bool, selecting: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [B * S, hc, H] of the same, expert loads [E], indexer loss; ids [B, S]."""
        streams, index_loss = self.attention_half(streams, ids, tables, indexed, selecting)
        streams, load = self.expert_half(streams, ids)
        return streams, load, index_loss

    def attention_half(
        self, streams: Tensor, ids: Tensor, tables: dict[str, Tensor], indexed: bool, selecting: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Streams after attention, and the indexer's loss."""
        u, post, comb = self.hc_attn.collapse(streams)
        out, index_loss = self.attn(self.attn_norm(u).view(*ids.shape, -1), tables, indexed, selecting)
        return spread(out.flatten(0, 1), streams, post, comb), index_loss


def head_collapse(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, geometry: Geometry) -> Tensor:
    """One vector of the streams [T, hc, H], weighed as `fn`, `base` and `scale` say; [T, H]."""
    z = streams.flatten(-2)
    mix = F.linear(z, fn.to(z.dtype)).float()
    mix = mix * torch.rsqrt(z.float().square().mean(-1, keepdim=True) + geometry.rms_norm_eps)
    pre = torch.sigmoid(mix * scale + base) + geometry.hc_eps
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype)


class Head(nn.Module):
    """Collapses the streams once more, normalises, and scores the vocabulary."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.fn = nn.Parameter(torch.empty(g.hc_mult, g.hc_mult * g.hidden_size))
        self.base = nn.Parameter(torch.zeros(g.hc_mult))
        self.scale = nn.Parameter(torch.full((1,), 0.1))
        self.norm = Norm(g.hidden_size, g.rms_norm_eps)
        self.weight = nn.Parameter(torch.empty(g.vocab_size, g.hidden_size))

    def hidden(self, streams: Tensor) -> Tensor:
        """What is scored against the vocabulary: [T, H] after the norm."""
        h: Tensor = self.norm(head_collapse(streams, self.fn, self.base, self.scale, self.geometry))
        return h

    def logits(self, streams: Tensor) -> Tensor:
        """[T, vocabulary] in the streams' type."""
        return F.linear(self.hidden(streams), self.weight)

    def forward(self, streams: Tensor, labels: Tensor) -> Tensor:
        """Nats of each label [T] float32, 0 where a label is negative."""
        logits = self.logits(streams).float()
        nats = torch.logsumexp(logits, -1) - logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return torch.where(labels >= 0, nats, 0.0)


class Model(nn.Module):
    """The whole model. Matrices may be bf16; norms, sinks, ape and stream mixes stay float32."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = g = geometry
        self.embed = nn.Embedding(g.vocab_size, g.hidden_size)
        self.layers = nn.ModuleList(Layer(g, i) for i in range(g.num_layers))
        self.head = Head(g)
        positions = torch.arange(MAX_LENGTH)
        for kind, compressed, width in (
            ("plain", False, g.head_dim),
            ("compress", True, g.head_dim),
            ("index", True, g.index_head_dim),
        ):
            cos, sin = rotation_tables(g.frequencies(compressed), positions, width)
            self.register_buffer(f"{kind}_cos", cos, persistent=False)
            self.register_buffer(f"{kind}_sin", sin, persistent=False)

    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return [cast(Layer, layer) for layer in self.layers]

    def tables(self) -> dict[str, Tensor]:
        """Rotation tables by name, [MAX_LENGTH, width] float32."""
        return {
            f"{kind}_{part}": getattr(self, f"{kind}_{part}")
            for kind in ("plain", "compress", "index")
            for part in ("cos", "sin")
        }

    def streams(self, ids: Tensor, stage: str) -> tuple[Tensor, list[Tensor], Tensor]:
        """Streams [B * S, hc, H] after the last layer, loads of each layer, sum of the indexers' losses.

        stage   "dense": queries see all compressed entries, the indexer is idle; "index": the same, and the
                indexer learns; "select": queries see the indexer's best entries, and it goes on learning
        """
        x = self.embed(ids).flatten(0, 1)
        streams = x[:, None].expand(-1, self.geometry.hc_mult, -1).contiguous()
        tables = self.tables()
        loads: list[Tensor] = []
        index_loss = torch.zeros((), device=x.device)
        selecting = torch.tensor(stage == "select", device=x.device)
        for layer in self.blocks():
            indexed = layer.attn.ratio == 4 and stage != "dense"
            streams, load, loss = layer(streams, ids, tables, indexed, selecting)
            loads.append(load)
            index_loss = index_loss + loss
        return streams, loads, index_loss

    def logits(self, ids: Tensor, stage: str) -> Tensor:
        """Logits [B, S, vocabulary] of ids [B, S]; S is a multiple of 128 and at most MAX_LENGTH."""
        streams, _, _ = self.streams(ids, stage)
        return self.head.logits(streams).view(*ids.shape, -1)

    def forward(self, ids: Tensor, labels: Tensor, stage: str) -> tuple[Tensor, list[Tensor], Tensor]:
        """Nats of each label [B, S] (0 where negative), loads, indexer loss."""
        streams, loads, index_loss = self.streams(ids, stage)
        return self.head(streams, labels.flatten()).view(ids.shape), loads, index_loss


def initialise(model: Model, seed: int) -> None:
    """Fills every matrix; outputs of sub-blocks start small, so that the streams start as the embedding."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.geometry.num_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("ape"):
            continue
        std = parameter.shape[-1] ** -0.5
        if name.startswith(("embed", "head.weight")):
            std = 0.02
        elif name.endswith(("wo_b.weight", "w2")):
            std *= depth
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def stays_wide(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is float32 in training, as DeepSeek keeps it: norms, sinks, stream mixes."""
    return parameter.ndim < 2 or name.endswith((".fn", "ape"))


def use_bf16(model: Anything) -> Anything:
    """Casts every other parameter to bf16."""
    for name, parameter in model.named_parameters():
        if not stays_wide(name, parameter):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def compile_model(model: Model) -> None:
    """Compiles half layers and the head for fixed shapes: seven graphs, as halves of one kind share code."""
    torch._dynamo.config.cache_size_limit = 64
    for layer in model.blocks():
        for half in ("attention_half", "expert_half"):
            setattr(layer, half, torch.compile(getattr(layer, half), dynamic=False, fullgraph=True))
    model.head.compile(dynamic=False, fullgraph=True)
