"""Attention heads that start by copying: they propose what followed the last token where it stood before.

Answers often repeat their prompt or themselves, and a model copies with pairs of heads in two of its layers ("induction
heads": Olsson et al. 2022, "In-context Learning and Induction Heads"). The one layer of an EAGLE-3 head can do it too:
its row j holds features of token j beside the embedding of token j + 1. A query made of the last token's embedding
finds the rows whose features are of that token, and the embeddings there are what followed. Training finds this slowly,
but goes on with it at once.

All of it is fitted: random codes of tokens, the map from features to the code of their token by least squares, and the
map from an embedding to its logit by reduced-rank regression.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from specdec_train.linear import LeastSquares

if TYPE_CHECKING:
    from specdec_train.heads.base import Sample
    from specdec_train.heads.eagle3 import Eagle3
    from specdec_train.targets import FrozenTarget

_SHARPNESS = 24.0
"""Attention score of a row with the same token; other rows' are near 0."""
_CARRIED = 0.1
"""Size of a code in the fused features, relative to theirs."""
_VOICE = 2.0
"""What a match adds to the logit of the token that followed."""
_MOST = 0.002
"""Share of all tokens above which a token counts no more in a fit."""


@torch.no_grad()
def start_copying(head: Eagle3, target: FrozenTarget, sample: Sample) -> None:
    """Set the last group of attention heads, and the part of the fusion that its keys read.

    Args:
        head: the other weights are set already.
        target: the target's weights.
        sample: answers to look at.
    """
    layer, attention = head.midlayer, head.midlayer.self_attn
    width, dim = head.norm.weight.shape[0], attention.head_dim
    group = attention.num_heads // attention.num_kv_heads
    tokens = _tokens(head, target, sample)
    slow = _slow_dimensions(dim)
    codes = tokens.codes(len(slow))
    place, size = _carry(head, target, sample, tokens, codes)
    factor = math.sqrt(_SHARPNESS * math.sqrt(dim))
    query, key, value = torch.zeros(dim, 2 * width), torch.zeros(dim, 2 * width), torch.zeros(dim, 2 * width)
    query[slow, :width] = factor * tokens.fit(codes).solve()
    key[slow, width:] = factor * place.T / layer.hidden_norm.weight
    fit = tokens.fit(functional.normalize(tokens.rows, dim=-1))
    centred = tokens.rows - tokens.rows.mean(dim=0)
    restore, keep = fit.reduced(dim, centred.T @ centred)
    value[:, :width] = keep @ fit.solve()
    attention.q_proj.weight[-group * dim :] = query.repeat(group, 1)
    attention.k_proj.weight[-dim:] = key
    attention.v_proj.weight[-dim:] = value
    voice = _VOICE * size / tokens.rows.norm(dim=-1).mean()
    attention.o_proj.weight[:, -group * dim :] = (voice / group * restore).repeat(1, group)


@frozen(eq=False)
class _Tokens:
    """The N tokens of the draft vocabulary."""

    token_ids: Tensor
    """int64 [N], ascending."""
    embedded: Tensor
    """[N, width]: as the layer reads them."""
    rows: Tensor
    """[N, width]: logits are these times the layer's normalised output."""
    weight: Tensor
    """[N]: how much each counts in a fit."""

    def fit(self, outputs: Tensor) -> LeastSquares:
        """From embeddings to outputs [N, *]."""
        fit, root = LeastSquares(self.embedded.shape[1], outputs.shape[1]), self.weight.sqrt()[:, None]
        fit.add(self.embedded * root, outputs * root)
        return fit

    def codes(self, size: int) -> Tensor:
        """[N, size]: of length 1, as different from one another as so few numbers allow, and linear in embeddings."""
        share = (self.weight / self.weight.sum())[:, None]
        centred = self.embedded - (share * self.embedded).sum(dim=0)
        variances, directions = torch.linalg.eigh(((share * centred).T @ centred).double())
        white = (directions / variances.clamp(min=variances[-1] * 1e-4).sqrt()).float()
        mixed = torch.linalg.qr(torch.randn(len(white), size))[0]
        return functional.normalize(centred @ white @ mixed, dim=-1)


def _tokens(head: Eagle3, target: FrozenTarget, sample: Sample) -> _Tokens:
    counts = torch.zeros(len(target.embedding))
    for batch in sample():
        counts += torch.bincount(batch.token_ids.flatten(), minlength=len(counts))
    share = (counts[target.draft_token_ids] / counts.sum()).clamp(max=_MOST)
    return _Tokens(
        target.draft_token_ids,
        head.midlayer.input_layernorm(target.embed(target.draft_token_ids)),
        target.output_rows * head.norm.weight,
        share + 0.01 * share.mean(),
    )


def _slow_dimensions(head_dim: int) -> Tensor:
    """int64: the dimensions of the slowest third of rotary pairs, in which far rows still match."""
    half = head_dim // 2
    pairs = torch.arange(half - max(1, half // 3), half)
    return torch.cat([pairs, pairs + half])


def _carry(head: Eagle3, target: FrozenTarget, sample: Sample, tokens: _Tokens, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Let the fused features carry the code of their row's token, where they matter least for logits.

    Returns:
        [width, code]: what normalised features are multiplied with for the code; and the features' root mean square.
    """
    width, num_codes = head.fc.out_features, codes.shape[1]
    fit, squares, count = LeastSquares(width, num_codes), torch.zeros(width, width), 0
    for batch in sample():
        real = torch.arange(batch.hidden.shape[1]) < batch.lengths[:, None]
        token_ids, hidden = batch.tokens_ahead(0)[real], batch.hidden[real]
        known = target.in_draft_vocabulary(token_ids)
        token_ids, hidden = token_ids[known], hidden[known]
        fit.add(hidden[:, 0], codes[torch.searchsorted(tokens.token_ids, token_ids)])
        fused = head.fc(hidden[:, : head.num_features].flatten(-2))
        squares, count = squares + fused.T @ fused, count + len(fused)
    importance = tokens.rows.T @ tokens.rows
    both = importance / importance.diagonal().mean() + squares / squares.diagonal().mean()
    place = torch.linalg.eigh(both.double())[1][:, :num_codes].float()
    size = (squares.diagonal().sum() / max(1, count * width)).sqrt()
    scale = _CARRIED * math.sqrt(width)
    head.fc.weight -= place @ (place.T @ head.fc.weight)
    head.fc.weight[:, :width] += scale * size * place @ fit.solve()
    return place / scale, size
