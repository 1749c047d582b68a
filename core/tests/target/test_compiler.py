"""What loading a target imports; each case in a process of its own."""

import subprocess
import sys

import pytest

LOAD = """
import sys
from specdec import LLM
def load(path):
    with LLM(path, dtype="float32", max_model_len=64, kv_cache_memory="4MiB") as llm:
        return llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids
"""


def run(code: str, path: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", LOAD + code, path],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from specdec.testing import tiny_model

    return str(tiny_model("llama", tmp_path_factory.mktemp("imports")))


def test_decoding_does_not_import_the_graph_compiler(path: str) -> None:
    out = run("assert load(sys.argv[1]); print('torch._dynamo' in sys.modules)", path)
    assert out.strip() == "False"


@pytest.mark.slow
def test_the_graph_compiler_works_afterwards(path: str) -> None:
    code = """
load(sys.argv[1])
import torch
graph = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
print(int(graph(torch.ones(1))), torch._dynamo.__file__.endswith("__init__.py"))
"""
    assert run(code, path).split() == ["2", "True"]


@pytest.mark.slow
def test_a_compiler_that_is_there_stays(path: str) -> None:
    code = """
import torch._dynamo
before = sys.modules["torch._dynamo"]
load(sys.argv[1])
print(sys.modules["torch._dynamo"] is before)
"""
    assert run(code, path).strip() == "True"


def test_decoding_imports_neither_sympy_nor_what_spreads_models_over_processes(path: str) -> None:
    unwanted = ("sympy", "torch.distributed.tensor", "torch.distributed.checkpoint", "numba", "llvmlite")
    forgo = "from specdec.target.importing import forgo_distributed; forgo_distributed();"
    out = run(f"{forgo} assert load(sys.argv[1]); print([name for name in {unwanted} if name in sys.modules])", path)
    assert out.strip() == "[]"
