"""Public kit for testing engines and plugins.

Tiny models (`specdec.testing.models`), proposers with known behaviour (`specdec.testing.oracles`), contract tests to
subclass (`specdec.testing.contracts`), hypothesis strategies (`specdec.testing.strategies`) and straight-line reference
computations (`specdec.testing.reference`). Contract tests and strategies need ``pip install specdec-core[test]``.
"""

from specdec.testing.context import engine_context
from specdec.testing.drawn import LawProposer, MisreportingProposer
from specdec.testing.models import ARCHITECTURES, load_module, set_eos, tiny_config, tiny_model, tiny_module
from specdec.testing.oracles import (
    LIES,
    ChainProposer,
    GappyProposer,
    LyingProposer,
    OracleProposer,
    RaisingProposer,
    RandomProposer,
    SelfProposer,
    SlowProposer,
    WrappedProposer,
    WrongProposer,
    chain_draft,
    use_proposer,
)
from specdec.testing.tokenizers import tiny_tokenizer

__all__ = [
    "ARCHITECTURES",
    "LIES",
    "ChainProposer",
    "GappyProposer",
    "LawProposer",
    "LyingProposer",
    "MisreportingProposer",
    "OracleProposer",
    "RaisingProposer",
    "RandomProposer",
    "SelfProposer",
    "SlowProposer",
    "WrappedProposer",
    "WrongProposer",
    "chain_draft",
    "engine_context",
    "load_module",
    "set_eos",
    "tiny_config",
    "tiny_model",
    "tiny_module",
    "tiny_tokenizer",
    "use_proposer",
]
