"""Llama, top to bottom. Tokens come packed: no batch dimension, no padding between sequences.

Every shape names T packed tokens, H hidden, Hq query heads, Hkv KV heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minibatch.model.attention import AttentionBackend, AttentionMetadata
from minibatch.model.backends import default_backend
from minibatch.model.config import ModelConfig
from minibatch.model.kv_cache import KVCache
from minibatch.model.rotary import RotaryEmbedding, rotate

MLP_ROWS = 1024  # tokens that the widest layer takes at a time on a CPU: bounds its memory


class LlamaForCausalLM(nn.Module):
    """Llama with fused projections, reading and writing a paged KV cache.

    A new model has a dtype, a device and a rotary table, but its weights are whatever the memory
    held: ``loader.load_model`` or ``loader.random_model`` fills them.

    Args:
        config: the shape.
        max_model_len: positions 0 to ``max_model_len - 1`` can be run; by default all that the
            checkpoint is meant for.
        dtype: of weights and activations; norms and logits are computed in float32 regardless.
        backend: how attention is computed; may be swapped later (``model.backend = ...``).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: AttentionBackend | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_model_len = config.context_length if max_model_len is None else max_model_len
        self.backend = backend or default_backend(config, device)
        with torch.device("meta"):  # shapes only: nothing is allocated, nothing drawn
            # Not nn.Embedding(...), which draws numbers even here: that imports torch's compiler.
            table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
            self.embed_tokens = nn.Embedding.from_pretrained(table)
            self.layers = nn.ModuleList(
                DecoderLayer(config, index, dtype) for index in range(config.num_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.lm_head = None  # tied: the embedding matrix serves both ends
            if not config.tie_word_embeddings:
                self.lm_head = nn.Linear(
                    config.hidden_size, config.vocab_size, bias=False, dtype=dtype
                )
        self.to_empty(device=device)
        self.requires_grad_(False)
        # After to_empty, which would leave garbage in a table that no checkpoint fills.
        self.rotary = RotaryEmbedding(config, self.max_model_len, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> Tensor:
        """One step: store K and V of these tokens, return their final hidden states.

        Args:
            input_ids: int64 ``[T]``, packed as ``meta`` describes.
            positions: int64 ``[T]``, each token's index in its own sequence.

        Returns:
            ``[T, H]``, normed: ready for ``compute_logits``.
        """
        cos, sin = self.prepare(positions, kv_cache, meta)
        hidden = self.embed_tokens(input_ids)  # [T, H]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, self.backend, kv_cache, meta)
        return self.norm(hidden)

    def prepare(
        self, positions: Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """What is the same in every layer: the backend's plan, cosines and sines ``[T, 1, D]``."""
        self.backend.prepare(meta, kv_cache, self.dtype)
        return self.rotary(positions, self._prompt_len_of_token(meta, positions), self.dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, float32 ``[R, V]``, of ``hidden [R, H]``.

        Pass only the rows that are sampled: for a prompt of 500 tokens that is one row.
        """
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight).float()
        return self.lm_head(hidden).float()

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Our weights under Hugging Face's names: views, so filling them fills the model.

        The fused projections appear as the slices that checkpoints store apart.
        """
        views = {"model.embed_tokens.weight": self.embed_tokens.weight}
        for layer in self.layers:
            prefix = f"model.layers.{layer.index}."
            views |= {prefix + name: view for name, view in layer.checkpoint_views().items()}
        views["model.norm.weight"] = self.norm.weight
        if self.lm_head is not None:
            views["lm_head.weight"] = self.lm_head.weight
        return views

    def _prompt_len_of_token(self, meta: AttentionMetadata, positions: Tensor) -> Tensor | None:
        if not self.config.rope.depends_on_prompt_length or meta.prompt_lens is None:
            return None
        return meta.prompt_lens[meta.sequence_of_token(positions.shape[0])]  # [T]


class DecoderLayer(nn.Module):
    """Attention, then MLP; each reads a normed copy and adds its answer to the stream."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, index, dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def forward(
        self,
        hidden: Tensor,  # [T, H]
        cos: Tensor,  # [T, 1, D]
        sin: Tensor,  # [T, 1, D]
        backend: AttentionBackend,
        kv_cache: KVCache,
        meta: AttentionMetadata,
    ) -> Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin, backend, kv_cache, meta)
        return hidden + self.mlp(self.post_attention_norm(hidden))  # [T, H]

    def checkpoint_views(self) -> dict[str, Tensor]:
        views = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_attention_norm.weight,
        }
        attention, mlp = self.attention, self.mlp
        qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        views |= _slices(attention.qkv_proj, qkv_names, attention.sizes)
        views |= _slices(attention.o_proj, ("self_attn.o_proj",))
        views |= _slices(mlp.gate_up_proj, ("mlp.gate_proj", "mlp.up_proj"), mlp.sizes)
        views |= _slices(mlp.down_proj, ("mlp.down_proj",))
        return views


class Attention(nn.Module):
    """Queries, keys and values from one matrix product; rope; store; attend; project back."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = (query_size, kv_size, kv_size)
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=bias, dtype=dtype)

    def forward(
        self,
        hidden: Tensor,  # [T, H]
        cos: Tensor,
        sin: Tensor,
        backend: AttentionBackend,
        kv_cache: KVCache,
        meta: AttentionMetadata,
    ) -> Tensor:
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        # Queries and keys lie side by side and turn alike: one rotation for both.
        turned = rotate(heads[:, : -self.num_kv_heads], cos, sin)
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        kv_cache.store(self.index, k, heads[:, -self.num_kv_heads :], meta.slot_mapping)
        out = backend.forward(q, kv_cache, self.index, meta)  # [T, Hq, D]
        return self.o_proj(out.flatten(1))  # [T, H]


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, gate and up being one matrix product."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.sizes = (inner, inner)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, hidden, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and len(x) > MLP_ROWS:
            return torch.cat([self(rows) for rows in x.split(MLP_ROWS)])
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [T, inner] each
        return self.down_proj(F.silu(gate).mul_(up))


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of 1, then by a learned weight a column.

    ``F.rms_norm`` squares, sums and scales in float32 whatever the input, and rounds once.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _slices(
    linear: nn.Linear, names: tuple[str, ...], sizes: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    """The parts of a fused projection by checkpoint name; without ``sizes`` it is one part."""
    parts = sizes or (linear.out_features,)
    views = {}
    for kind, parameter in linear.named_parameters():  # "weight", and "bias" if there is one
        for name, view in zip(names, parameter.split(parts), strict=True):
            views[f"{name}.{kind}"] = view
    return views
