"""Suffix decoding by counting every substring: slow, short and independent of the index."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction

from attrs import define, field


@define
class Counts:
    """Every pattern of at most ``depth`` tokens in some texts, oldest first, with its occurrences."""

    texts: list[list[int]]
    depth: int
    occurrences: dict[tuple[int, ...], list[tuple[int, int]]] = field(factory=dict)
    """Pattern -> (text, start) of each, in order."""

    def __attrs_post_init__(self) -> None:
        for number, text in enumerate(self.texts):
            for start in range(len(text)):
                for end in range(start + 1, min(start + self.depth, len(text)) + 1):
                    self.occurrences.setdefault(tuple(text[start:end]), []).append((number, start))

    def next(self, pattern: tuple[int, ...]) -> list[tuple[int, Fraction]]:
        """What follows a pattern, with its share: the most frequent (of equals the latest) first, then by share and id.

        A pattern of full depth is followed by what follows its latest occurrence that is not the very end of an open
        text.
        """
        if len(pattern) >= self.depth:
            return []
        found = {
            p[-1]: where for p, where in self.occurrences.items() if len(p) == len(pattern) + 1 and p[:-1] == pattern
        }
        total = sum(map(len, found.values()))
        shares = {token: Fraction(len(where), total) for token, where in found.items()}
        if not shares:
            return []
        best = max(shares, key=lambda token: (shares[token], found[token][-1]))
        others = sorted((token for token in shares if token != best), key=lambda token: (-shares[token], token))
        return [(token, shares[token]) for token in (best, *others)]


@define
class Place:
    """Where a draft stands: a pattern that is counted, or a position in a text that is copied from there on."""

    pattern: tuple[int, ...]
    copied: tuple[int, int] | None = None


class Oracle:
    """Chooses drafts by the rules of `specdec_suffix.drafts`."""

    def __init__(self, counts: Counts, is_open: bool) -> None:
        """Take what was counted.

        Args:
            counts: of one growing text, or of stored ones.
            is_open: whether it is a growing text, whose last suffix is the match itself and not an occurrence of it.
        """
        self.counts = counts
        self.is_open = is_open

    def after(self, place: Place) -> list[tuple[int, float, Place]]:
        """Tokens that may follow, with the share as floating point, the best first."""
        texts, depth = self.counts.texts, self.counts.depth
        copied = place.copied
        if copied is None and len(place.pattern) == depth:
            where = self.counts.occurrences[place.pattern]
            if self.is_open:
                where = [(text, start) for text, start in where if start + depth < len(texts[text])]
            if not where:
                return []
            copied = (where[-1][0], where[-1][1] + depth)
        if copied is not None:
            text, at = copied
            return [(texts[text][at], 1.0, Place((), (text, at + 1)))] if at < len(texts[text]) else []
        found = self.counts.next(place.pattern)
        count = sum(len(self.counts.occurrences[(*place.pattern, token)]) for token, _ in found)
        return [
            (
                token,
                1.0 if len(found) == 1 else len(self.counts.occurrences[(*place.pattern, token)]) / count,
                Place((*place.pattern, token)),
            )
            for token, _ in found
        ]

    def chain(self, place: Place, budget: int, least: float) -> tuple[list[int], list[float]]:
        """The draft from one place."""
        tokens, probabilities, probability = [], [], 1.0
        while len(tokens) < budget:
            following = self.after(place)
            if not following:
                break
            token, share, place = following[0]
            probability *= share
            if share < 1.0 and probability < least:
                break
            tokens.append(token)
            probabilities.append(probability)
        return tokens, probabilities

    def tree(self, place: Place, budget: int, least: float) -> tuple[list[int], list[float], list[int]]:
        """The tree from one place: the most probable first, then the one after the earlier token, then in order."""
        tokens, probabilities, parents = [], [], []
        heap: list[tuple[float, int, int, int, Place]] = []

        def push(place: Place, weight: float, parent: int) -> None:
            following = self.after(place)
            for rank, (token, share, then) in enumerate(following):
                if share == 1.0 or weight * share >= least:
                    heapq.heappush(heap, (-weight * share, parent, rank, token, then))

        push(place, 1.0, -1)
        while heap and len(tokens) < budget:
            weight, parent, _, token, then = heapq.heappop(heap)
            tokens.append(token)
            probabilities.append(-weight)
            parents.append(parent)
            push(then, -weight, len(tokens) - 1)
        return tokens, probabilities, parents

    def matches(self, text: Sequence[int]) -> list[Place]:
        """Suffixes of a text that are counted, the shortest first; of an open text those that occurred before."""
        places = []
        for length in range(1, min(len(text), self.counts.depth) + 1):
            pattern = tuple(text[-length:])
            if len(self.counts.occurrences.get(pattern, ())) > self.is_open:
                places.append(Place(pattern))
        return places

    def draft(
        self, text: Sequence[int], limit: int, factor: float, least: float, trees: bool
    ) -> tuple[float, list[int], list[float], list[int]]:
        """Score, tokens, probabilities and parents of the best draft; the longest match of equals."""
        best: tuple[float, list[int], list[float], list[int]] = (0.0, [], [], [])
        for place in self.matches(text):
            budget = min(limit, int(factor * len(place.pattern) + 1e-6))
            if trees:
                tokens, probabilities, parents = self.tree(place, budget, least)
            else:
                tokens, probabilities = self.chain(place, budget, least)
                parents = list(range(-1, len(tokens) - 1))
            score = 0.0
            for probability in probabilities:
                score += probability
            if tokens and score >= best[0]:
                best = score, tokens, probabilities, parents
        return best
