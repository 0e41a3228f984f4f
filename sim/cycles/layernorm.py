"""Cycles of the LayerNorm: both passes of a group, and its roots."""

from __future__ import annotations

from collections import deque

from dtp.config import Config
from dtp.fixed import Int
from dtp.layernorm import LayerNormParams, inverse_root

__all__ = ["LayerNormCycles", "root_cycles"]


def root_cycles(config: Config, variances: Int) -> int:
    """Cycles of the roots of a group whose rows have these V: each is shifted to its leading bits first."""
    p = LayerNormParams(config)
    half = p.variance_bits // 2
    _, exponents = inverse_root(variances)
    leads = [half - int(e) + 2 if v else half for v, e in zip(variances.tolist(), exponents.tolist(), strict=True)]
    return sum(2 + p.total_bits + lead + 1 for lead in leads)


class LayerNormCycles:
    """``LayerNorm`` without its numbers, cycle by cycle from reset; P is :class:`dtp.layernorm.LayerNormParams`.

    A word is taken in an odd cycle, ``P.word_cycles`` after the one before, and in the second pass while fewer than
    ``P.queue_words`` are on their way. After the first pass, ``P.square_cycles`` behind its last beat, come the rows'
    roots, then the second pass can begin. A word is offered ``P.element_cycles`` + 1 after its last beat.

    Members
    -------
    ready: whether a word would be taken; offers: whether one is offered; idle: whether all have left
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._params = LayerNormParams(config)
        self._now = self._left = self._waiting = 0
        self._busy_until = -1  # cycle of the last beat of the word that is worked on
        self._roots_until = -1
        self._normalising = False
        self._ending = False  # the word that is worked on is its pass's last
        self._out: deque[int] = deque()

    @property
    def _busy(self) -> bool:
        return self._now <= self._busy_until

    @property
    def ready(self) -> bool:
        free = not self._busy or (self._now == self._busy_until and not self._ending)
        room = not self._normalising or self._waiting != self._params.queue_words
        return self._now % 2 == 1 and self._now > self._roots_until and free and room

    @property
    def offers(self) -> bool:
        return bool(self._out) and self._out[0] <= self._now

    @property
    def idle(self) -> bool:
        return not (self._busy or self._now <= self._roots_until or self._waiting or self._normalising)

    def step(self, word: tuple[int, Int] | None, pop: bool) -> None:
        """One cycle: a word that is taken, with the words of a pass and V of the rows, and whether one may leave."""
        p, now = self._params, self._now
        if pop and self.offers:
            self._out.popleft()
            self._waiting -= 1
        if self._ending and now == self._busy_until:
            self._normalising, self._ending = not self._normalising, False
        if word is not None:
            count, variances = word
            self._left = (self._left or count) - 1
            self._busy_until = now + p.word_cycles
            self._ending = self._left == 0
            last_beat = self._busy_until - 1
            if self._normalising:
                self._waiting += 1
                self._out.append(last_beat + p.element_cycles + 1)
            elif self._ending:
                self._roots_until = last_beat + p.square_cycles + root_cycles(self._config, variances)
        self._now += 1
