"""The SDPA backend against an independent oracle: each query alone, over its own request's K/V in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specdec.attention import KVCache, LayerKV
from specdec.attention import sdpa as sdpa_module
from specdec.attention.sdpa import SdpaBackend
from specdec.types import AttentionLayer, AttentionRequirements, PackedBatch

BLOCK = 4


class Scene:
    """Requests with cached K/V and new queries, in shuffled blocks of a cache whose other slots hold NaN."""

    def __init__(self, layer, lengths, parents=None, dtype=torch.float32, block_size=BLOCK, shuffle=True):
        """`lengths`: per request (cached, new); `parents`: per request a list, or None for chains."""
        self.layer, self.dtype = layer, dtype
        self.lengths = lengths
        self.parents = parents or [None] * len(lengths)
        needed = [-(-(c + n) // block_size) for c, n in lengths]
        blocks = list(range(sum(needed) + 3))
        if shuffle:
            random.Random(0).shuffle(blocks)
        slots = len(blocks) * block_size
        shape_k, shape_v = (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.v_head_dim)
        keys = torch.full((slots, *shape_k), math.nan, dtype=dtype)
        values = torch.full((slots, *shape_v), math.nan, dtype=dtype)
        tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        self.keys, self.values, slot_mapping, positions, packed_parents = [], [], [], [], []
        for r, (cached, new) in enumerate(lengths):
            own = [blocks.pop() for _ in range(needed[r])]
            tables[r, : len(own)] = torch.tensor(own)
            where = torch.tensor([own[p // block_size] * block_size + p % block_size for p in range(cached + new)])
            k = torch.randn(cached + new, *shape_k).to(dtype)
            v = torch.randn(cached + new, *shape_v).to(dtype)
            keys[where[:cached]], values[where[:cached]] = k[:cached], v[:cached]
            self.keys.append(k)
            self.values.append(v)
            slot_mapping.append(where[cached:])
            tree = self.parents[r] or list(range(-1, new - 1))
            depth = [0] * new
            for i, parent in enumerate(tree):
                depth[i] = depth[parent] + 1 if parent >= 0 else 0
            positions += [cached + d for d in depth]
            packed_parents += tree
        new = [n for _, n in lengths]
        total = [c + n for c, n in lengths]
        self.cache = KVCache((LayerKV(keys, values),), slots // block_size, block_size)
        self.batch = PackedBatch(
            input_ids=torch.zeros(sum(new), dtype=torch.int64),
            positions=torch.tensor(positions),
            slot_mapping=torch.cat(slot_mapping),
            query_start_loc=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(total, dtype=torch.int32),
            block_tables=tables,
            logits_indices=torch.arange(len(new)),
            max_query_len=max(new),
            max_seq_len=max(total),
            parents=torch.tensor(packed_parents, dtype=torch.int32) if parents else None,
        )
        self.query = torch.randn(sum(new), layer.num_heads, layer.head_dim).to(dtype)
        self.new_keys = torch.cat([k[c:] for k, (c, _) in zip(self.keys, lengths, strict=True)])
        self.new_values = torch.cat([v[c:] for v, (c, _) in zip(self.values, lengths, strict=True)])
        self.sinks = torch.randn(layer.num_heads) if layer.sinks else None

    def run(self, backend=None):
        backend = backend or SdpaBackend()
        plan = backend.plan(self.batch, self.cache)
        return backend.attend(self.query, self.new_keys, self.new_values, self.layer, plan, self.sinks)

    def expected(self):
        rows, token = [], 0
        for r, (cached, new) in enumerate(self.lengths):
            for i in range(new):
                rows.append(self._one(r, cached, i, self.query[token]))
                token += 1
        return torch.stack(rows).to(self.dtype)

    def _one(self, r, cached, i, query):
        layer = self.layer
        path, tree = [i], self.parents[r] or list(range(-1, self.lengths[r][1] - 1))
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        index = list(range(cached)) + [cached + t for t in path]
        position = len(index) - 1
        keep = [
            index[p]
            for p in range(len(index))
            if (layer.sliding_window is None or position - p < layer.sliding_window)
            and (layer.chunk_size is None or position // layer.chunk_size == p // layer.chunk_size)
        ]
        k, v = self.keys[r][keep].double(), self.values[r][keep].double()
        out = torch.empty(layer.num_heads, layer.v_head_dim, dtype=torch.float64)
        for h in range(layer.num_heads):
            shared = h * layer.num_kv_heads // layer.num_heads
            scores = k[:, shared] @ query[h].double() * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            sink = [] if self.sinks is None else [self.sinks[h].double()]
            weights = torch.softmax(torch.stack([*scores, *sink]), 0)[: len(keep)]
            out[h] = weights @ v[:, shared]
        return out


def make_layer(heads=6, kv_heads=2, dim=16, v_dim=None, **facts):
    return AttentionLayer(
        index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim or dim,
        scaling=facts.pop("scaling", dim**-0.5),
        **facts,
    )


def check(scene, tolerance=1e-5):
    found = scene.run()
    assert found.is_contiguous()
    torch.testing.assert_close(found, scene.expected(), atol=tolerance, rtol=tolerance)


FACTS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "chunk": {"chunk_size": 6},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "window and sinks": {"sliding_window": 3, "sinks": True},
    "window and softcap": {"sliding_window": 7, "softcap": 3.0},
    "scaling": {"scaling": 0.7},
}

LENGTHS = {
    "one token": [(0, 1)],
    "one prompt": [(0, 13)],
    "one decode": [(11, 1)],
    "one verify": [(11, 5)],
    "one chunk": [(9, 8)],
    "even decodes": [(11, 1)] * 3,
    "ragged decodes": [(11, 1), (3, 1), (25, 1), (0, 1)],
    "even verifies": [(12, 4)] * 3,
    "ragged verifies": [(11, 4), (3, 3), (25, 5), (7, 1), (0, 2)],
    "mixed": [(0, 70), (11, 1), (5, 4), (8, 66), (30, 3), (3, 1)],
    "block edges": [(BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 1), (0, BLOCK), (BLOCK - 1, 2)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_every_query_sees_its_own_context_and_nothing_else(facts, lengths):
    check(Scene(make_layer(**facts), lengths))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_dims(dim):
    check(Scene(make_layer(dim=dim), LENGTHS["mixed"]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2), (9, 3)])
def test_grouped_heads(heads, kv_heads):
    check(Scene(make_layer(heads, kv_heads), LENGTHS["ragged verifies"]))


@pytest.mark.parametrize("lengths", [LENGTHS["mixed"], LENGTHS["one prompt"]], ids=["mixed", "one prompt"])
def test_values_narrower_than_keys(lengths):
    check(Scene(make_layer(dim=24, v_dim=16), lengths))


def test_values_wider_than_keys():
    check(Scene(make_layer(dim=16, v_dim=24), LENGTHS["mixed"]))


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_trees_see_their_own_path(facts):
    trees = [[-1, 0, 0, 1, 1, 2, 4], None, [-1, 0, 1, 1, 0], [-1], [-1, 0, 1, 2, 3, 4, 5, 0, 7, 7, 9, 1]]
    check(Scene(make_layer(**facts), [(9, 7), (0, 20), (4, 5), (6, 1), (21, 12)], trees))


def test_random_trees_of_up_to_64_nodes():
    rng = random.Random(1)
    for _ in range(10):
        lengths, trees = [], []
        for _ in range(3):
            size = rng.randint(1, 65)
            trees.append([-1] + [rng.randrange(i) for i in range(1, size)])
            lengths.append((rng.choice([0, 1, BLOCK - 1, BLOCK, 33]), size))
        check(Scene(make_layer(sliding_window=rng.choice([None, 9])), lengths, trees))


def test_a_chain_given_as_a_tree_equals_the_chain():
    scene = Scene(make_layer(), [(9, 5), (3, 70)])
    as_tree = Scene(make_layer(), [(9, 5), (3, 70)], [list(range(-1, 4)), list(range(-1, 69))])
    as_tree.query = scene.query
    as_tree.__dict__.update(cache=scene.cache, new_keys=scene.new_keys, new_values=scene.new_values)
    torch.testing.assert_close(as_tree.run(), scene.run(), atol=1e-5, rtol=1e-5)


def test_new_keys_and_values_land_in_their_slots():
    scene = Scene(make_layer(), LENGTHS["mixed"])
    scene.run()
    kv = scene.cache.layers[0]
    torch.testing.assert_close(kv.keys[scene.batch.slot_mapping], scene.new_keys)
    torch.testing.assert_close(kv.values[scene.batch.slot_mapping], scene.new_values)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_long_calls_are_split_without_changing_the_result(facts, monkeypatch):
    scene = Scene(make_layer(**facts), [(30, 100), (40, 7), (0, 90)])
    monkeypatch.setattr(sdpa_module, "MAX_SCORES", 6 * 130 * 7)
    check(scene)


@pytest.mark.parametrize("name", ["one verify", "ragged decodes", "ragged verifies", "even verifies"])
@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_the_padded_group_of_devices_without_host_reads(facts, name, monkeypatch):
    """On a GPU, decode and verify steps are one padded group; its results equal those of separate groups."""
    monkeypatch.setattr(sdpa_module, "HOST_READS_ARE_FREE", frozenset())
    check(Scene(make_layer(**facts), LENGTHS[name]))
    check(Scene(make_layer(**facts), [(9, 7), (4, 5)], [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 1, 0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    for facts in FACTS.values():
        scene = Scene(make_layer(dim=64, **facts), LENGTHS["mixed"], dtype=dtype)
        torch.testing.assert_close(scene.run(), scene.expected(), atol=2e-2, rtol=2e-2)


def test_requests_that_share_a_call_have_similar_shapes():
    scene = Scene(make_layer(), [(2000, 1), (10, 1), (1900, 1), (10, 6), (0, 70)])
    groups = [list(group.indices) for group in sdpa_module._grouped(scene.batch)]
    assert sorted(groups) == [[0, 2], [1], [3], [4]]


def test_strided_views_are_taken_as_they_are():
    scene = Scene(make_layer(), LENGTHS["ragged verifies"])
    expected = scene.expected()
    scene.query = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
    fused = torch.cat([scene.new_keys, scene.new_values], dim=-1)
    scene.new_keys, scene.new_values = fused[..., :16], fused[..., 16:]
    torch.testing.assert_close(scene.run(), expected, atol=1e-5, rtol=1e-5)
    assert scene.run().is_contiguous()


def test_supports_names_the_layers_it_cannot_serve():
    layers = (make_layer(), make_layer(6, 4))
    requirements = AttentionRequirements(layers=layers, dtype="float32", device="cpu", block_size=16)
    assert SdpaBackend().supports(requirements) == ["layer 0 has 6 query heads for 4 K/V heads"]


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
@pytest.mark.parametrize("lengths", [[(11, 1)], [(11, 5)], [(9, 70)]], ids=["decode", "verify", "chunk"])
def test_blocks_in_a_row_are_read_in_place(facts, lengths):
    scene = Scene(make_layer(**facts), lengths, shuffle=False)
    scene = _ascending(scene)
    plan = SdpaBackend().plan(scene.batch, scene.cache)
    out = SdpaBackend().attend(scene.query, scene.new_keys, scene.new_values, scene.layer, plan, scene.sinks)
    torch.testing.assert_close(out, scene.expected(), atol=1e-5, rtol=1e-5)
    (columns,) = plan.groups[0]._columns.values()
    assert isinstance(columns.slots, slice)


def _ascending(scene):
    """The scene of one request with its blocks in ascending order."""
    cached, total = scene.lengths[0][0], sum(scene.lengths[0])
    kv = scene.cache.layers[0]
    kv.keys.fill_(math.nan)
    kv.values.fill_(math.nan)
    first = int(scene.batch.block_tables.min()) * BLOCK
    kv.keys[first : first + cached] = scene.keys[0][:cached]
    kv.values[first : first + cached] = scene.values[0][:cached]
    scene.batch.slot_mapping.copy_(torch.arange(first + cached, first + total))
    scene.batch.block_tables.copy_(scene.batch.block_tables.sort(dim=1).values)
    return scene
