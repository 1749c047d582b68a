"""From what a user passes (text, ids, parameters) to requests the engine can run; everything wrong is said here."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.engine.group import RequestGroup
from specdec.engine.request import Request, child_seed
from specdec.errors import InvalidRequestError
from specdec.sampling.params import SamplingParams, is_unicode
from specdec.sampling.stops import StopChecker
from specdec.speculation import as_request_speculation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.config import EngineConfig
    from specdec.engine.constraints import Constraints
    from specdec.grammar.interface import CompiledGrammar
    from specdec.grammar.state import RequestGrammar
    from specdec.speculation import RequestSpeculation
    from specdec.types import TargetInfo


class InputProcessor:
    """Checks and tokenises prompts; hands out seeds and the order of arrival."""

    def __init__(
        self,
        config: EngineConfig,
        info: TargetInfo,
        tokenizer: Any,
        max_model_len: int,
        *,
        lossless: bool,
        methods: Sequence[str] = (),
        num_speculative_tokens: int = 0,
        constraints: Constraints | None = None,
    ) -> None:
        """Prepare requests of one engine.

        Args:
            config: the engine's.
            info: the target's facts.
            tokenizer: None when the model has none.
            max_model_len: most tokens of prompt and output.
            lossless: whether the verifier keeps the target's law.
            methods: speculative methods that a request may choose.
            num_speculative_tokens: the engine's limit; 0 without speculation.
            constraints: its grammars and logits processors; None takes no request that asks for them.
        """
        self._config = config
        self._info = info
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._lossless = lossless
        self._methods = tuple(methods)
        self._num_speculative_tokens = num_speculative_tokens
        self._constraints = constraints
        self._seeds = random.Random(config.seed)
        self._arrivals = 0
        self._tokenizer_lock = threading.Lock()

    def tokenise(self, prompt: Any, *, add_special_tokens: bool = True) -> dict[str, Any]:
        """The prompt as ``{"prompt": text or None, "prompt_token_ids": ids}``; may be called from any thread."""
        text, token_ids = self._token_ids(prompt, add_special_tokens=add_special_tokens)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def tokenise_chat(self, messages: Any, template_options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation through the chat template; may be called from any thread."""
        from specdec.target.tokenizer import apply_chat_template

        with self._tokenizer_lock:
            return apply_chat_template(self._tokenizer, messages, model=self._config.model, **template_options)

    def prepare(self, prompt: Any, params: Any) -> tuple[dict[str, Any], CompiledGrammar | None]:
        """What of `group` takes long, from any thread: tokens as `tokenise` gives them, and the compiled grammar.

        `group` finds the grammar again as long as the result is held.

        Raises:
            InvalidRequestError: the prompt, the grammar or an argument of a logits processor is wrong.
        """
        return self.tokenise(prompt), self._compile(params) if isinstance(params, SamplingParams) else None

    def is_slow(self, params: Any) -> bool:
        """Whether `prepare` has a grammar to compile, which may take minutes."""
        return (
            isinstance(params, SamplingParams) and self._constraints is not None and self._constraints.is_slow(params)
        )

    def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        return None if self._constraints is None else self._constraints.compile(params)

    def group(
        self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0, speculation: Any = None
    ) -> RequestGroup:
        """Build the requests of one prompt.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served; the message says what would be right.
        """
        text, token_ids = self._token_ids(prompt)
        self._check_prompt(token_ids)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling parameters must be a SamplingParams, not {type(params).__name__}")
        params = params.check_against(
            vocab_size=self._info.vocab_size, max_model_len=self._max_model_len, tokenizer=self._tokenizer
        )
        if not hasattr(priority, "__index__"):
            raise InvalidRequestError(f"priority is {priority!r}; it must be an integer")
        if priority and self._config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} needs scheduling_policy='priority'; "
                f"this engine has scheduling_policy={self._config.scheduling_policy!r}"
            )
        own_speculation = as_request_speculation(speculation)
        if own_speculation is not None:
            own_speculation.check_against(self._methods, self._num_speculative_tokens)
        compiled = self._compile(params)
        room = self._max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        requests = []
        for index in range(params.n):
            name = request_id if params.n == 1 else f"{request_id}#{index}"
            requests.append(
                self._request(
                    name,
                    token_ids,
                    params,
                    child_seed(seed, index),
                    max_tokens,
                    priority,
                    index,
                    own_speculation,
                    None if self._constraints is None else self._constraints.follow(compiled, params),
                )
            )
        return RequestGroup(request_id, text, requests, self._lossless)

    def _request(
        self,
        request_id: str,
        token_ids: np.ndarray,
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        priority: int,
        index: int,
        speculation: RequestSpeculation | None,
        grammar: RequestGrammar | None,
    ) -> Request:
        stop_ids = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(self._info.eos_token_ids)
        )
        self._arrivals += 1
        return Request(
            request_id,
            token_ids,
            params,
            seed=seed,
            stop_token_ids=stop_ids,
            stop_checker=StopChecker(
                params,
                prompt_token_ids=token_ids,
                tokenizer=self._tokenizer,
                eos_token_ids=frozenset(self._info.eos_token_ids),
                max_tokens=max_tokens,
            ),
            max_tokens=max_tokens,
            priority=priority,
            arrival_index=self._arrivals,
            index=index,
            speculation=speculation,
            grammar=grammar,
        )

    def _token_ids(self, prompt: Any, *, add_special_tokens: bool = True) -> tuple[str | None, np.ndarray]:
        """The prompt's text, when it came as text, and its ids."""
        if isinstance(prompt, dict):
            keys = set(prompt)
            if keys == {"prompt"}:
                prompt = prompt["prompt"]
            elif keys == {"prompt_token_ids"}:
                prompt = prompt["prompt_token_ids"]
            elif keys == {"prompt", "prompt_token_ids"}:
                return prompt["prompt"], _as_ids(prompt["prompt_token_ids"])
            else:
                raise InvalidRequestError(
                    f"a prompt given as a dict has the key 'prompt' or 'prompt_token_ids', not {sorted(map(str, keys))}"
                )
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError(
                    f"the model {self._info.model!r} has no tokenizer, so a prompt must be a list of token ids; "
                    "set tokenizer to a directory or model id that has one"
                )
            if not is_unicode(prompt):
                raise InvalidRequestError("the prompt is no valid Unicode: it has lone surrogates")
            with self._tokenizer_lock:
                ids = self._tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]
            return prompt, np.asarray(ids, dtype=np.int64)
        return None, _as_ids(prompt)

    def _check_prompt(self, token_ids: np.ndarray) -> None:
        if len(token_ids) == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._info.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(
                f"prompt token id {bad} is outside the vocabulary 0..{self._info.vocab_size - 1} "
                f"of {self._info.model!r}"
            )
        if len(token_ids) >= self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self._max_model_len} it can have at most "
                f"{self._max_model_len - 1}. Shorten it or raise max_model_len (the model's own limit is "
                f"{self._info.max_position_embeddings})"
            )


def _as_ids(value: Any) -> np.ndarray:
    try:
        ids = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"a prompt is a string or a flat list of token ids: {error}") from error
    if ids.ndim == 1 and ids.size == 0:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"a prompt is a string or a flat list of integer token ids, not {type(value).__name__} of {ids.dtype}"
        )
    return ids.astype(np.int64)
