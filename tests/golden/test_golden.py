"""Targets against plain transformers in float32: logits of every way to feed tokens, and greedy tokens."""

from __future__ import annotations

import pytest
import torch

from specdec.target.model import TargetModel
from specdec.types import Needs
from tests.golden.models import CHANGES, VOCAB, golden_model
from tests.golden.paged import PagedRunner, Request

TOLERANCE = 1e-4
LENGTHS = (7, 45, 26)
"""Prompt lengths: beyond every window and chunk of the tiny models."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Pair:
    """A target and the plain model it must equal, built twice from one seed."""

    def __init__(self, model_type, fuse):
        self.plain = golden_model(model_type)
        self.target = TargetModel.from_model(golden_model(model_type), name=model_type, fuse=fuse)

    @torch.inference_mode()
    def expected(self, tokens):
        """[T, V] logits of the plain model."""
        return self.plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


@pytest.fixture(
    scope="module",
    params=[(name, fuse) for name in CHANGES for fuse in (False, True)],
    ids=lambda p: f"{p[0]}{'-fused' if p[1] else ''}",
)
def pair(request):
    torch.set_num_threads(1)
    return Pair(*request.param)


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_whole_prompts_in_one_batch(pair):
    runner = PagedRunner(pair.target)
    texts = prompts()
    for tokens, logits in zip(texts, runner.logits([(Request(), tokens) for tokens in texts]), strict=True):
        close(logits, pair.expected(tokens))


def test_prompts_in_chunks_beside_each_other(pair):
    runner = PagedRunner(pair.target)
    texts = prompts(1)
    requests = [Request() for _ in texts]
    found = [[] for _ in texts]
    for size in (5, 1, 16, 9, 30):
        work = [(r, t[r.cached : r.cached + size]) for r, t in zip(requests, texts, strict=True) if r.cached < len(t)]
        for (request, _), logits in zip(work, runner.logits(work), strict=True):
            found[requests.index(request)].append(logits)
    for tokens, logits in zip(texts, found, strict=True):
        close(torch.cat(logits), pair.expected(tokens))


def test_rejected_drafts_leave_no_trace(pair):
    """Verify steps with wrong draft tokens, then the right tokens over them."""
    runner = PagedRunner(pair.target)
    texts = prompts(2)
    requests = [Request() for _ in texts]
    runner.step([(r, t[:-6]) for r, t in zip(requests, texts, strict=True)])
    for accepted in (2, 0, 1):
        work = []
        for r, t in zip(requests, texts, strict=True):
            wrong = [(token + 17) % VOCAB for token in t[r.cached + 1 + accepted : r.cached + 5]]
            work.append((r, t[r.cached : r.cached + 1 + accepted] + wrong))
        before = [r.cached for r in requests]
        for logits, r, t, start in zip(runner.logits(work), requests, texts, before, strict=True):
            r.cached = start + 1 + accepted
            close(logits[: 1 + accepted], pair.expected(t)[start : r.cached])


def test_greedy_tokens_equal_generate(pair):
    """Ragged prompts decode side by side; each gives what `generate` gives alone."""
    runner, count = PagedRunner(pair.target), 20
    texts = prompts(3)
    requests = [Request() for _ in texts]
    chosen = [
        [int(logits[-1].argmax())] for logits in runner.logits([(r, t) for r, t in zip(requests, texts, strict=True)])
    ]
    for _ in range(count - 1):
        step = runner.step([(r, c[-1:]) for r, c in zip(requests, chosen, strict=True)])
        for c, token in zip(chosen, step.logits.argmax(-1).tolist(), strict=True):
            c.append(token)
    for tokens, found in zip(texts, chosen, strict=True):
        ids = torch.tensor([tokens])
        generated = pair.plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert found == generated[0, len(tokens) :].tolist()


def test_tree_nodes_equal_their_paths(pair):
    runner = PagedRunner(pair.target)
    tokens = prompts(4)[2]
    request, other = Request(), Request()
    runner.step([(request, tokens[:-1]), (other, tokens[:3])])
    nodes, parents = [tokens[-1], 5, 9, 11, 13, 17, 19], [-1, 0, 0, 1, 1, 2, 4]
    logits, chain = runner.logits([(request, nodes), (other, tokens[3:9])], [parents, None])
    close(chain, pair.expected(tokens[:9])[3:])
    for node in range(len(nodes)):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        close(logits[node], pair.expected(tokens[:-1] + path)[-1])


def test_hidden_states(pair):
    """Taps give the last norm's output and chosen layers' outputs; only the asked rows have logits."""
    runner = PagedRunner(pair.target, Needs(hidden_states=True, aux_layers=(1, 0)))
    texts = prompts(5)
    output = runner.step([(Request(), tokens) for tokens in texts], rows=[6, 51])
    assert output.logits.shape == (2, VOCAB)
    start = 0
    for tokens in texts:
        own, start = slice(start, start + len(tokens)), start + len(tokens)
        final, first, second = plain_hidden_states(pair.plain, tokens)
        close(output.hidden_states[own], final)
        close(output.aux_hidden_states[0][own], second)
        close(output.aux_hidden_states[1][own], first)
    close(output.logits[0], pair.expected(texts[0])[6])
    close(output.logits[1], pair.expected(texts[1])[44])


def plain_hidden_states(model, tokens):
    """[T, H] each: after the last norm, and the outputs of layers 0 and 1."""
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    found = []
    hooks = [layer.register_forward_hook(lambda module, args, out: found.append(out)) for layer in layers[:2]]
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    first, second = (out[0] if isinstance(out, tuple) else out for out in found)
    return plain.hidden_states[-1][0], first[0], second[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_half_precision_stays_close(model_type, dtype):
    plain = golden_model(model_type)
    target = TargetModel.from_model(golden_model(model_type).to(dtype), name=model_type)
    runner = PagedRunner(target)
    tokens = prompts()[1]
    found = torch.cat(
        [runner.logits([(request, part)])[0] for request in [Request()] for part in (tokens[:30], tokens[30:])]
    )
    assert found.dtype == dtype
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.1


def test_prompts_around_chunk_boundaries(pair):
    """Rows at the edges of prefill chunks of 32 tokens equal a one-shot forward (prompt logprobs depend on them)."""
    runner = PagedRunner(pair.target)
    generator = torch.Generator().manual_seed(6)
    texts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (31, 32, 33, 63, 64, 65, 97)]
    requests, found = [Request() for _ in texts], [[] for _ in texts]
    for _ in range(4):
        at = [i for i, t in enumerate(texts) if requests[i].cached < len(t)]
        work = [(requests[i], texts[i][requests[i].cached : requests[i].cached + 32]) for i in at]
        for i, logits in zip(at, runner.logits(work), strict=True):
            found[i].append(logits)
    for tokens, logits in zip(texts, found, strict=True):
        close(torch.cat(logits), pair.expected(tokens))


def test_a_verify_step_equals_single_steps(pair):
    """Five tokens at once over a cached prefix give the logits of five steps of one token."""
    runner = PagedRunner(pair.target)
    tokens = prompts(7)[1]
    together, alone = Request(), Request()
    runner.step([(together, tokens[:-5]), (alone, tokens[:-5])])
    (at_once,) = runner.logits([(together, tokens[-5:])])
    single = torch.cat([runner.logits([(alone, [token])])[0] for token in tokens[-5:]])
    close(at_once, single)
