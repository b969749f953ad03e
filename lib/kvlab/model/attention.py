"""Attention: queries over the keys and values that a cache hands back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kvlab import kernels
from kvlab.cache import BlockView, KVCache, SinkView, Step, View, Visibility
from kvlab.config import ModelConfig
from kvlab.model.layers import RMSNorm
from kvlab.rope import rotate


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245); multi-head and multi-query are its two ends.

    The projections to queries, keys and values are one matrix, in this order of rows.

    Args:
        config: the model's shape.
        layer: index of the layer, for the cache.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads = [config.n_head, config.n_kv_head, config.n_kv_head]
        width = config.head_dim * sum(self.heads)
        self.qkv = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.out = nn.Linear(config.n_head * config.head_dim, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "batch time hidden_size"],
        cache: KVCache,
        step: Step,
        rope: tuple[Tensor, Tensor] | None,
    ) -> Float[Tensor, "batch time hidden_size"]:
        """Project, rotate, append to the cache, attend to what it holds, project back.

        Args:
            x: the normalised residual stream.
            cache: receives the new keys and values.
            step: of this pass.
            rope: cosines and sines of the positions; None for learned positions.
        """
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, sum(self.heads), self.head_dim).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        # Written first, read second: a token must see itself.
        keys, values = cache.append(self.layer, k, v, step)
        mixed = attend(q, keys, values, step.view(self.layer))
        if cache.needs_queries:
            cache.observe(self.layer, q, step)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


def attend(
    q: Float[Tensor, "batch n_head time head_dim"],
    keys: Float[Tensor, "batch n_kv_head keys head_dim"],
    values: Float[Tensor, "batch n_kv_head keys head_dim"],
    view: View,
) -> Float[Tensor, "batch n_head time head_dim"]:
    """softmax(q k / sqrt(head_dim)) v over the keys that the view shows, by the cheapest kernel that obeys it.

    Args:
        q: queries.
        keys: what the cache holds.
        values: what the cache holds.
        view: who sees what.
    """
    if isinstance(view, BlockView):
        return _attend_blocks(q, keys, values, view)
    if isinstance(view, SinkView):
        return _attend_sinks(q, keys, values, view)
    group = q.shape[1] // keys.shape[1]
    if q.shape[2] == 1:
        # One query: the query heads of a group become rows of one matrix, which share the mask, and no key is copied.
        folded = q.reshape(q.shape[0], keys.shape[1], group, q.shape[3])
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=view.mask).reshape(q.shape)
    keys, values = _repeated(keys, group), _repeated(values, group)
    if view.visibility is Visibility.CAUSAL:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    mask = view.mask
    if view.visibility is Visibility.CAUSAL_TAIL:
        mask = _lower_right(q.shape[2], keys.shape[2])
    elif mask is not None and mask.shape[1] > 1:
        mask = _repeated(mask, group)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def _repeated(
    x: Shaped[Tensor, "batch n_kv_head rows columns"], group: int
) -> Shaped[Tensor, "batch n_head rows columns"]:
    """What belongs to a KV head, once for each query head of its group."""
    return x.repeat_interleave(group, dim=1) if group > 1 else x


def _attend_sinks(
    q: Float[Tensor, "batch n_head time head_dim"],
    keys: Float[Tensor, "batch n_kv_head keys head_dim"],
    values: Float[Tensor, "batch n_kv_head keys head_dim"],
    view: SinkView,
) -> Float[Tensor, "batch n_head time head_dim"]:
    """Queries rotated twice: as they are for the window, turned back for the sinks.

    The two lie side by side, and beside every key stand zeros where the other query is: one kernel does it all. Values
    are padded too, because only a kernel with equal widths needs no memory for the scores.
    """
    assert view.back is not None
    head_dim = q.shape[3]
    both = torch.cat((rotate(q, *view.back), q), dim=3)
    wide = torch.zeros((*keys.shape[:3], 2 * head_dim), dtype=keys.dtype, device=keys.device)
    wide[:, :, : view.sinks, :head_dim] = keys[:, :, : view.sinks]
    wide[:, :, view.sinks :, head_dim:] = keys[:, :, view.sinks :]
    group = q.shape[1] // keys.shape[1]
    mixed = F.scaled_dot_product_attention(
        both,
        _repeated(wide, group),
        _repeated(F.pad(values, (0, head_dim)), group),
        attn_mask=view.mask,
        scale=head_dim**-0.5,
    )
    return mixed[..., :head_dim]


def _attend_blocks(
    q: Float[Tensor, "1 n_head time head_dim"],
    keys: Float[Tensor, "1 n_kv_head slots head_dim"],
    values: Float[Tensor, "1 n_kv_head slots head_dim"],
    view: BlockView,
) -> Float[Tensor, "1 n_head time head_dim"]:
    """Each query over the blocks of its own request: tokens and drafts one by one, prompts and chunks at once."""
    if not view.many:
        return _attend_few(q[0].transpose(0, 1), keys[0], values[0], view).transpose(0, 1)[None]
    mixed = torch.empty_like(q)
    if len(view.few):
        mixed[0][:, view.few] = _attend_few(q[0][:, view.few].transpose(0, 1), keys[0], values[0], view).transpose(0, 1)
    for start, end, slots, seen in view.many:
        mixed[:, :, start:end] = attend(q[:, :, start:end], keys[:, :, slots], values[:, :, slots], seen)
    return mixed


def _attend_few(
    q: Float[Tensor, "few n_head head_dim"],
    keys: Float[Tensor, "n_kv_head slots head_dim"],
    values: Float[Tensor, "n_kv_head slots head_dim"],
    view: BlockView,
) -> Float[Tensor, "few n_head head_dim"]:
    """Single queries, by the kernel that follows block tables where there is one, else over copies of their keys."""
    if kernels.enabled() and q.device.type == "cpu" and q.dtype in kernels.KERNEL_DTYPES and q.shape[2] % 8 == 0:
        return kernels.paged_attention(
            q, keys, values, view.tables, view.rows, view.lengths, view.block_size, view.window or 0
        )
    slots, seen = view.gathered
    gathered = keys[:, slots].transpose(0, 1), values[:, slots].transpose(0, 1)
    return attend(q[:, :, None], *gathered, seen)[:, :, 0]


def _lower_right(queries: int, keys: int) -> Tensor:
    """Causal, the last query at the last key. Imported late: the module brings torch's compiler, a second's work."""
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)
