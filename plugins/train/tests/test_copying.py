"""What an EAGLE-3 head starts from: attention heads that copy."""

import pytest
import torch

from specdec_train.batches import Batch
from specdec_train.heads import copying
from specdec_train.heads.eagle3 import Eagle3
from specdec_train.objective import Objective
from specdec_train.targets import FrozenTarget

WIDTH, VOCAB, LENGTH = 64, 120, 60
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}


def repeated(features: torch.Tensor) -> Batch:
    """Four sequences whose second halves repeat the first; the lowest features are a map of the row's token."""
    half = torch.stack([torch.randperm(VOCAB)[: LENGTH // 2] for _ in range(4)])
    token_ids = torch.cat([half, half, half[:, :1]], dim=1)
    hidden = torch.randn(4, LENGTH, 4, WIDTH)
    hidden[:, :, 0] = features[token_ids[:, :-1]] + 0.1 * torch.randn(4, LENGTH, WIDTH)
    return Batch(token_ids, hidden, torch.full((4,), LENGTH), torch.full((4,), LENGTH // 2 + 1))


def started(voice: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Accuracy per draft step of a head that was only started, on sequences it has not seen."""
    torch.manual_seed(0)
    monkeypatch.setattr(copying, "_VOICE", voice)
    embedding, features = torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH)
    layer = {
        "input_layernorm.weight": torch.ones(WIDTH),
        "post_attention_layernorm.weight": torch.ones(WIDTH),
        "self_attn.q_proj.weight": 0.1 * torch.randn(4 * 32, WIDTH),
        "self_attn.k_proj.weight": 0.1 * torch.randn(2 * 32, WIDTH),
        "self_attn.v_proj.weight": 0.1 * torch.randn(2 * 32, WIDTH),
        "self_attn.o_proj.weight": 0.1 * torch.randn(WIDTH, 4 * 32),
        "mlp.gate_proj.weight": 0.1 * torch.randn(48, WIDTH),
        "mlp.up_proj.weight": 0.1 * torch.randn(48, WIDTH),
        "mlp.down_proj.weight": 0.1 * torch.randn(WIDTH, 48),
    }
    target = FrozenTarget(embedding, embedding, torch.ones(WIDTH), layer, torch.arange(VOCAB))
    head = Eagle3(SHAPE)
    head.initialise(target, lambda: iter([repeated(features) for _ in range(8)]))
    return Objective(head, target, 3)(repeated(features)).accuracy


def test_a_head_starts_by_copying_what_stood_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In draft steps too, whose queries need the last token alone; without copying it is chance, 1 in 120."""
    loud, silent = started(80.0, monkeypatch), started(0.0, monkeypatch)
    assert loud[0] > 0.4
    assert min(loud[1:]) > 0.15
    assert max(silent) < 0.05
