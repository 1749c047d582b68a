"""The training simulation of a draft against drafting one token after another."""

import attrs
import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from specdec_train.batches import Batch
from specdec_train.heads.base import TrainableHead
from specdec_train.heads.eagle import Eagle, next_state_map
from specdec_train.heads.eagle3 import Eagle3
from specdec_train.heads.medusa import Medusa
from specdec_train.heads.mlp_speculator import MLPSpeculator
from specdec_train.objective import STEP_DECAY, Objective
from specdec_train.targets import FrozenTarget

WIDTH, VOCAB, STEPS = 32, 50, 3
CONFIG = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "emb_dim": WIDTH,
    "inner_dim": 16,
    "n_predict": 3,
}
KINDS = [Eagle, Eagle3, Medusa, MLPSpeculator]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def target(ids: list[int] | None = None) -> FrozenTarget:
    embedding = torch.randn(VOCAB, WIDTH)
    rows = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    return FrozenTarget(embedding, embedding[rows], torch.ones(WIDTH), {}, rows)


def batch(lengths: tuple[int, ...] = (9,), prompts: tuple[int, ...] = (3,)) -> Batch:
    longest = max(lengths)
    return Batch(
        torch.randint(0, VOCAB, (len(lengths), longest + 1)),
        torch.randn(len(lengths), longest, 4, WIDTH),
        torch.tensor(lengths),
        torch.tensor(prompts),
    )


def head(kind: type[TrainableHead]) -> TrainableHead:
    made = kind(CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def one_by_one(made: TrainableHead, given: Batch, frozen: FrozenTarget, row: int) -> list[torch.Tensor]:
    """Outputs of each draft step after ``row``, from a sequence that ends there: nothing later can be looked at."""
    cut = Batch(
        given.token_ids[:, : row + 1 + STEPS],
        given.hidden[:, : row + 1],
        given.lengths,
        given.prompt_lengths,
    )
    outputs = made.steps(cut, frozen, STEPS)
    return [output[:, row] for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_sees_nothing_behind_it(kind: type[TrainableHead]) -> None:
    made, given, frozen = head(kind), batch(), target()
    whole = made.steps(given, frozen, STEPS)
    for row in (0, 3, 6):
        for step, alone in enumerate(one_by_one(made, given, frozen, row)):
            torch.testing.assert_close(whole[step][:, row], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Eagle, Eagle3])
def test_draft_steps_equal_a_causal_layer_over_true_and_drafted_rows(kind: type[TrainableHead]) -> None:
    """The cache at draft step j holds the true rows and j drafted ones; a plain causal pass over them must agree."""
    made, given, frozen = head(kind), batch(), target()
    row = 4
    outputs = made.steps(given, frozen, STEPS)
    features = given.hidden[0, : row + 1]
    if kind is Eagle3:
        stream = made.fc(features[:, :3].flatten(-2))
        feedback = None
    else:
        stream = features[:, 3]
    for step in range(STEPS):
        length = row + 1 + step
        tokens = frozen.embed(given.token_ids[0, 1 : length + 1])[None]
        feedback = outputs_of_plain_pass(made, stream[None], tokens)
        drafted = feedback[0, -1]
        expected = made.norm(drafted) if kind is Eagle3 else drafted
        torch.testing.assert_close(outputs[step][0, row], expected, atol=1e-4, rtol=1e-4)
        stream = torch.cat([stream, drafted[None]])


def test_eagle_starts_as_the_linear_guess_of_the_next_state() -> None:
    """Where states follow from token and state before by a linear map, the map is found, and drafts are right."""
    frozen, both = target(), batch((30, 25, 28), (3, 2, 4))
    true_map = 0.1 * torch.randn(WIDTH, 2 * WIDTH)
    for place in range(1, both.hidden.shape[1]):
        token = frozen.embed(both.token_ids[:, place])
        both.hidden[:, place, -1] = torch.cat([token, both.hidden[:, place - 1, -1]], dim=-1) @ true_map.T
    torch.testing.assert_close(next_state_map(frozen, lambda: iter([both])), true_map, atol=1e-2, rtol=0)
    last_layer = {f"{part}.weight": torch.rand(shape) for part, shape in LAST_LAYER.items()}
    made = Eagle(CONFIG)
    made.initialise(attrs.evolve(frozen, last_layer=last_layer), lambda: iter([both]))
    for step, output in enumerate(made.steps(both, frozen, STEPS)):
        states = both.hidden[:, 1 + step :, -1]
        torch.testing.assert_close(output[0, : states.shape[1]], states[0], atol=2e-2, rtol=0)


def test_an_mlp_speculator_starts_as_the_linear_guess_of_the_next_states() -> None:
    """Where states follow from token and state before by a linear map, all draft steps say the target's tokens."""
    frozen, both = target(), batch((60, 50, 55), (3, 2, 4))
    true_map = torch.cat([0.2 * torch.randn(WIDTH, WIDTH), torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]], dim=1)
    for place in range(1, both.hidden.shape[1]):
        token = frozen.embed(both.token_ids[:, place])
        before = both.hidden[:, place - 1, -1]
        both.hidden[:, place, -1] = (
            torch.cat([token, before / before.square().mean(-1, keepdim=True).sqrt()], -1) @ true_map.T
        )
        both.token_ids[:, place + 1] = frozen.logits(both.hidden[:, place, -1]).argmax(dim=-1)
    made = MLPSpeculator(CONFIG | {"inner_dim": WIDTH + 1})
    made.initialise(frozen, lambda: iter([both]))
    measured = Objective(made, frozen, STEPS)(both)
    assert min(measured.accuracy) > 0.8, measured.accuracy


LAST_LAYER = {
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
    "self_attn.q_proj": (32, WIDTH),
    "self_attn.k_proj": (16, WIDTH),
    "self_attn.v_proj": (16, WIDTH),
    "mlp.gate_proj": (48, WIDTH),
    "mlp.up_proj": (48, WIDTH),
}


def outputs_of_plain_pass(made: TrainableHead, stream: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    if isinstance(made, Eagle3):
        return made.midlayer(tokens, stream, 0, [])
    return made.layers[0](made.fc(torch.cat([tokens, stream], dim=-1)), 0, [])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: type[TrainableHead]) -> None:
    made, frozen = head(kind), target()
    both = batch((9, 6), (3, 2))
    alone = Batch(both.token_ids[1:, :7], both.hidden[1:, :6], both.lengths[1:], both.prompt_lengths[1:])
    padded = made.steps(both, frozen, STEPS)[0][1, :5]
    torch.testing.assert_close(padded, made.steps(alone, frozen, STEPS)[0][0, :5], atol=1e-5, rtol=1e-4)


def test_a_head_that_knows_the_answers_survives_every_step() -> None:
    """Row i of step j must be asked for token i + 2 + j; any other shift is caught here."""

    class Oracle(Medusa):
        def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[torch.Tensor]:
            return [10 * target.embed(batch.tokens_ahead(2 + step)) for step in range(num_steps)]

    given, frozen = batch((3 + 2 * (STEPS + 1), 2 + STEPS + 1), (3, 2)), target()
    measured = Objective(Oracle(CONFIG), frozen, STEPS)(given)
    assert measured.accuracy == [1.0] * STEPS
    assert measured.acceptance_length == 1.0 + STEPS


def test_tokens_outside_the_draft_vocabulary_are_misses_without_a_loss() -> None:
    frozen = target([1, 2, 3])
    given = batch()
    given.token_ids[:] = 40
    measured = Objective(head(Eagle3), frozen, STEPS)(given)
    assert float(measured.loss.detach()) == 0.0
    assert measured.accuracy == [0.0] * STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_trained(kind: type[TrainableHead]) -> None:
    made = head(kind)
    Objective(made, target(), STEPS)(batch()).loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name


@pytest.mark.parametrize("kind", [Eagle, Medusa])
def test_loss_and_accuracy_equal_a_walk_over_every_place(kind: type[TrainableHead]) -> None:
    """Which places count, which law and state are the label, and how steps are weighted."""
    made, given, frozen = head(kind), batch((9, 6), (3, 2)), target([*range(0, VOCAB, 2)])
    measured = Objective(made, frozen, STEPS)(given)
    loss, accuracy = walked(made, given, frozen)
    assert float(measured.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert measured.accuracy == pytest.approx(accuracy)


def test_a_draft_ends_at_its_first_miss() -> None:
    """Right at every step but the first: accurate, and of no use."""

    class FirstWrong(Medusa):
        def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[torch.Tensor]:
            outputs = [10 * target.embed(batch.tokens_ahead(2 + step)) for step in range(num_steps)]
            return [-outputs[0], *outputs[1:]]

    measured = Objective(FirstWrong(CONFIG), target(), STEPS)(batch((9, 7), (3, 2)))
    assert measured.accuracy == [0.0, 1.0, 1.0]
    assert measured.acceptance_length == 1.0


def test_the_acceptance_length_is_that_of_decoding_with_the_drafts() -> None:
    """Verify steps begin where the one before ended, not at every row alike; a draft may reach beyond the answer."""
    lengths, prompts = (40, 33), (3, 8)
    right = torch.rand(STEPS, 2, 40) < 0.6

    class Sometimes(Medusa):
        def steps(self, batch: Batch, target: FrozenTarget, num_steps: int) -> list[torch.Tensor]:
            signs = torch.where(right, 10.0, -10.0)[..., None]
            return [signs[step] * target.embed(batch.tokens_ahead(2 + step)) for step in range(num_steps)]

    measured = Objective(Sometimes(CONFIG), target(), STEPS)(batch(lengths, prompts))
    steps = accepted = 0
    for row, (length, known) in enumerate(zip(lengths, prompts, strict=True)):
        said = known + 1  # the first token of an answer comes from the prompt's step
        while said < length + 1:
            draft = [step for step in range(STEPS) if said + step < length + 1]
            kept = 0
            while kept < len(draft) and right[kept, row, said - 2]:
                kept += 1
            steps, accepted, said = steps + 1, accepted + kept, said + kept + 1
    assert (measured.num_drafts, measured.num_accepted_tokens) == (steps, accepted)


@torch.no_grad()
def walked(made: TrainableHead, given: Batch, frozen: FrozenTarget) -> tuple[float, list[float]]:
    """Loss and accuracy, one place after another."""
    outputs = made.steps(given, frozen, STEPS)
    loss, hits = 0.0, []
    for step, output in enumerate(outputs):
        terms, right, distances = [], [], []
        for row, (length, prompt) in enumerate(zip(given.lengths.tolist(), given.prompt_lengths.tolist(), strict=True)):
            for place in range(given.hidden.shape[1]):
                goal = place + 2 + step
                if not prompt <= goal <= length:
                    continue
                token = int(given.token_ids[row, goal])
                logits = (made.rows(frozen) @ output[row, place]).log_softmax(dim=-1)
                law = frozen.logits(given.hidden[row, goal - 1, -1]).softmax(dim=-1)
                terms.append(-float((law * logits).sum()) if token in frozen.draft_token_ids.tolist() else 0.0)
                distances.append(float(smooth_l1_loss(output[row, place], given.hidden[row, goal - 1, -1])))
                right.append(int(frozen.draft_token_ids[logits.argmax()]) == token)
        both = made.cross_entropy_weight * sum(terms) + made.regression_weight * sum(distances)
        loss += STEP_DECAY**step * both / len(terms)
        hits.append(sum(right) / len(right))
    return loss, hits
