"""What the engine asks a control, and the control that changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.control.schedule import Schedule


Outcome = tuple[str, int, "Sequence[int]"]
"""What became of a draft: its request, how many draft tokens were verified, and the indices of those accepted (of a
chain the first ones)."""


class Control(ABC):
    """Decides how many tokens each request may draft. Called on the engine's thread, several times per step:

    `record_step` when a step is committed, `limits` before drafts are asked for, `record_draft` when they are there.
    """

    is_paused = False
    """Whether drafting is suspended because it does not pay."""
    current = 0
    """The most draft tokens given to any request by the last call of `limits`."""

    @abstractmethod
    def limits(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """Draft tokens for the next step.

        Args:
            request_ids: the decoding requests.
            caps: the most that each can use; 0 for one that shall not draft.

        Returns:
            A number from 0 to its cap for each request.
        """

    def record_step(  # noqa: B027 - optional
        self, num_requests: int, num_tokens: int, seconds: float, outcomes: Sequence[Outcome]
    ) -> None:
        """A step was committed.

        Args:
            num_requests: requests that emitted tokens.
            num_tokens: tokens the target computed; 0 when the step also held prompt tokens, which cost differently.
            seconds: from scheduling to commit, without drafting.
            outcomes: of each draft in the step.
        """

    def record_draft(  # noqa: B027 - optional
        self, request_ids: Sequence[str], limits: Sequence[int], counts: Sequence[int], seconds: float
    ) -> None:
        """Drafts were made: as many tokens as ``counts`` says of the ``limits`` given, in ``seconds`` together."""

    def finish(self, request_id: str) -> None:  # noqa: B027 - optional
        """A request ended."""


class FixedControl(Control):
    """As many tokens as the settings say: ``speculation = "always"``."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def limits(self, request_ids: Sequence[str], caps: Sequence[int]) -> list[int]:
        """See `Control.limits`."""
        k = self._schedule.limit(len(request_ids))
        found = [min(cap, k) for cap in caps]
        self.current = max(found, default=0)
        return found
