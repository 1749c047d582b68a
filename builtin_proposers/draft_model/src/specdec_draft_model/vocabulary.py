"""What the drafter's token ids mean for the target, and the other way round.

With equal tokenizers ids mean the same, although the two logits may be of different width (padding). With different
ones the draft is limited to the tokens that both have (token-level intersection, Timor et al. 2025): the drafter's
logits of other tokens are left out, so that its law is renormalised over the rest, and ids are mapped. What the target
emits and the drafter has no token for is shown to the drafter as one replacement token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from specdec.errors import ConfigError
from specdec.sampling.token_text import token_bytes

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False, kw_only=True)
class VocabularyMap:
    """Maps between the ids of target and drafter."""

    to_draft: np.ndarray
    """int64 [target vocabulary]: what the drafter is fed for a target id."""
    draft_ids: Tensor | None = None
    """int64 [I]: the draft ids that the target has too, ascending; None: ids are the same in both."""
    target_ids: Tensor | None = None
    """int64 [I]: their target ids."""
    draft_to_target: Tensor | None = None
    """int64 [target vocabulary]: ``to_draft`` on the drafter's device, for draft tokens; None: no mapping needed."""

    def logits(self, logits: Tensor) -> Tensor:
        """[R, draft vocabulary] -> [R, I], the tokens that may be drafted."""
        return logits if self.draft_ids is None else logits.index_select(1, self.draft_ids)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Indices into what `logits` returns -> target ids."""
        return ids if self.target_ids is None else self.target_ids[ids]

    def fed(self, token_ids: Tensor) -> Tensor:
        """Drafted target ids -> draft ids."""
        return token_ids if self.draft_to_target is None else self.draft_to_target[token_ids]


def same_ids(target_vocab_size: int, draft_vocab_size: int, tokenizer: Any) -> VocabularyMap:
    """The map of equal tokenizers; target ids beyond the drafter's width are fed as its replacement token.

    Args:
        target_vocab_size: width of the target's logits.
        draft_vocab_size: width of the drafter's.
        tokenizer: the drafter's, or None.
    """
    ids = np.arange(target_vocab_size)
    ids[draft_vocab_size:] = _replacement(tokenizer, draft_vocab_size)
    return VocabularyMap(to_draft=ids)


def shared_tokens(
    target: Any, draft: Any, target_vocab_size: int, draft_vocab_size: int, device: torch.device
) -> VocabularyMap:
    """The map between different tokenizers, over the tokens that stand for the same bytes.

    Args:
        target: the target's tokenizer.
        draft: the drafter's.
        target_vocab_size: width of the target's logits.
        draft_vocab_size: width of the drafter's.
        device: where the drafter runs.

    Raises:
        ConfigError: a tokenizer is missing, or no token is shared.
    """
    for owner, tokenizer in (("target", target), ("drafter", draft)):
        if tokenizer is None:
            raise ConfigError(
                f"speculative.use_heterogeneous_vocab maps tokens by their text, but the {owner} has no tokenizer",
                path="speculative.use_heterogeneous_vocab",
            )
    in_target, in_draft = _ids_by_text(target, target_vocab_size), _ids_by_text(draft, draft_vocab_size)
    pairs = sorted((in_draft[text], in_target[text]) for text in in_draft.keys() & in_target.keys())
    if not pairs:
        raise ConfigError(
            "speculative.use_heterogeneous_vocab: the tokenizers of target and drafter have no token in common",
            path="speculative.use_heterogeneous_vocab",
        )
    draft_ids, target_ids = np.array(pairs, dtype=np.int64).T.copy()
    to_draft = np.full(target_vocab_size, _replacement(draft, draft_vocab_size), dtype=np.int64)
    to_draft[target_ids] = draft_ids
    return VocabularyMap(
        to_draft=to_draft,
        draft_ids=torch.from_numpy(draft_ids).to(device),
        target_ids=torch.from_numpy(target_ids).to(device),
        draft_to_target=torch.from_numpy(to_draft).to(device),
    )


def check_same_tokens(target: Any, draft: Any, target_vocab_size: int, draft_vocab_size: int) -> None:
    """See that two tokenizers give every id of the common range the same token.

    Raises:
        ConfigError: they do not; the first differing id and the remedy are named.
    """
    if target is None or draft is None:
        if target_vocab_size != draft_vocab_size:
            owner = "target" if target is None else "drafter"
            raise _differ(
                f"the {owner} has no tokenizer to compare, and the vocabularies have {target_vocab_size} (target) and "
                f"{draft_vocab_size} (drafter) ids",
                "set tokenizer, or draft with a model of the same vocabulary",
            )
        return
    ours, theirs = _tokens(target), _tokens(draft)
    for token_id in range(min(max(ours, default=-1), max(theirs, default=-1)) + 1):
        if ours.get(token_id) != theirs.get(token_id):
            raise _differ(
                f"token {token_id} is {ours.get(token_id)!r} for the target and {theirs.get(token_id)!r} for the "
                f"drafter (vocabularies of {target_vocab_size} and {draft_vocab_size} ids)",
                "draft with a model that has the target's tokenizer, or set speculative.use_heterogeneous_vocab = true",
            )


def _differ(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"speculative.model: the drafter's tokenizer is not the target's: {what}; {remedy}", path="speculative.model"
    )


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _ids_by_text(tokenizer: Any, vocab_size: int) -> dict[bytes | str, int]:
    """Token ids by what they stand for; special tokens by their role, so that both ends of text are one token."""
    table = token_bytes(tokenizer)
    roles = {tokenizer.eos_token_id: "end of text", tokenizer.bos_token_id: "beginning of text"}
    special = set(tokenizer.all_special_ids)
    found: dict[bytes | str, int] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if token_id >= vocab_size:
            continue
        if token_id in special:
            text: bytes | str = roles.get(token_id, token)
        elif table is not None:
            text = table.of(token_id)
        else:
            text = token.replace("Ġ", " ").replace("▁", " ").encode()
        found.setdefault(text, token_id)
    return found


def _replacement(tokenizer: Any, vocab_size: int) -> int:
    """What the drafter is fed for a token that it does not have: its unknown token, a space, or the first id.

    A tokenizer may have ids beyond ``vocab_size``, the width of the drafter, which has no embedding of them.
    """
    if tokenizer is None:
        return 0
    vocabulary = tokenizer.get_vocab()
    wanted = (tokenizer.unk_token_id, *(vocabulary.get(space) for space in ("Ġ", "▁", " ")))
    return int(next((token_id for token_id in wanted if token_id is not None and token_id < vocab_size), 0))
