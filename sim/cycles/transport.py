"""Cycles of the transport engine: every word taken and every word given, under any pattern of stalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dtp.config import Config
from dtp.solve import THREADS
from dtp.transport import (
    BUFFER_WORDS,
    DESCRIPTOR_BYTES,
    STATUS_BYTES,
    TransportJob,
    TransportParams,
    word_beats,
)

__all__ = ["CoreStep", "TransportCycles", "core_cycles", "stream_cycles"]


@dataclass(frozen=True)
class CoreStep:
    """One cycle at the ports of the core: what is ready, what is offered, whether the job ends with this cycle."""

    factor_ready: bool
    state_ready: bool
    o_valid: bool
    o_last: bool
    ended: bool


class TransportCycles:
    """``TransportCore`` without its numbers, cycle by cycle; P is :class:`dtp.transport.TransportParams`.

    Cycle 0 is the one in which the job is taken. Inputs are ready from cycle 2 on while words of the job are missing
    and their buffer holds fewer than 512; a word leaves it when its token's expansion issues its last tile.

    The engine issues a tile a cycle: ``words`` · slots · ``groups`` tiles project a token, as many expand it. In a
    cycle in which it is free (idle, or issuing the last tile of a phase) it begins the expansion of the oldest token,
    if its m was there a cycle ago, or else the projection of the next one, if its words were there a cycle ago and a
    context was free. An expansion waits at the last tile of a word while ``P.output_depth`` words are on their way.

    Gram: a token takes ``P.gram_phases`` phases of max(words · ``P.gram_cycles``, ``P.min_gram_phase``) cycles; it
    begins when its factors were there a cycle ago, a context was free and the token before is at its end.

    A solve lane starts a token in the first of its turns, every fourth cycle, that is not earlier than

    - ``P.project_cycles`` after the last tile of its projection,
    - ``P.gram_latency`` after the last cycle of its Gram words, where the mode solves,
    - ``P.start_cycles`` after the job was taken,
    - the turn of the last operation of the token four contexts of the lane before.

    m is there ``4 · len(program) + P.operation_cycles`` later. A word of outputs is offered ``P.output_cycles`` after
    the issue of its last tile, if none waits before it.
    """

    def __init__(self, config: Config, job: TransportJob) -> None:
        p = self._params = TransportParams(config)
        self._job = job
        self._lanes = config.solve_lanes
        self._length = p.solve_cycles(job)
        slots = len(job.slots) if p.vectors == 1 else 1
        self._phase = job.words * slots * job.groups
        self._token_words = (job.factor_words, job.state_words(p))
        self._token_outputs = job.output_words(p)
        phase = max(job.words * p.gram_cycles, p.min_gram_phase(job.groups))
        phases = p.gram_phases(job.groups)
        self._gram_token = phase * phases
        self._gram_words = phase * (phases - 1) + job.words * p.gram_cycles
        self.cycle = 0
        self._taken = [0, 0]
        self._freed = [0, 0]
        self._available = [0, 0]
        self._in_flight = 0
        self._can_project = self._can_expand = False
        self._projected = self._expanded = 0
        self._running = self._expanding = False
        self._step = 0
        self._loaded: dict[int, int] = {}
        self._formed: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._solved = 0
        self._thread_free: dict[int, int] = {}
        self._queue: deque[int] = deque()
        self._words = 0
        self._out = 0
        self._gram_available = self._gram_in_flight = 0
        self._can_gram = False
        self._gram_end = -1
        self._gram_begun = 0

    @property
    def offers(self) -> bool:
        """Whether a word is offered in the next cycle to be stepped."""
        return bool(self._queue) and self._queue[0] <= self.cycle

    def step(self, factor_valid: bool, state_valid: bool, o_ready: bool) -> CoreStep:
        """One cycle with these inputs offered and this sink; what the core shows in it."""
        p, job, now = self._params, self._job, self.cycle
        ready = [
            now >= 2
            and self._taken[n] < job.tokens * self._token_words[n]
            and self._taken[n] - self._freed[n] < BUFFER_WORDS
            for n in range(2)
        ]
        arrived = []
        for n, valid in enumerate((factor_valid, state_valid)):
            self._taken[n] += valid and ready[n]
            arrived.append(valid and ready[n] and self._taken[n] % self._token_words[n] == 0)

        # Outputs.
        offered = self.offers
        last = offered and (self._out + 1) % self._token_outputs == 0
        gone = offered and o_ready
        if gone:
            self._queue.popleft()
            self._out += 1

        # The engine.
        group_end = (self._step + 1) % job.groups == 0
        room = self._words != p.output_depth
        issue = self._running and (not self._expanding or room or not group_end)
        ends = issue and self._step == self._phase - 1
        free = not self._running or ends
        begin_expand = free and self._can_expand
        begin_project = free and self._can_project and not self._can_expand
        expanded = ends and self._expanding
        pushed = issue and self._expanding and group_end
        if pushed:
            self._queue.append(now + p.output_cycles)
        if ends and not self._expanding:
            self._loaded[self._projected - 1] = now + p.project_cycles
        self._solve()
        can_project = (
            self._available[0] > 0 and self._available[1] > 0 and self._in_flight != p.contexts and not begin_project
        )
        can_expand = self._done.get(self._expanded, now + 1) <= now and not begin_expand

        # The Gram unit.
        begin_gram = self._can_gram and now >= self._gram_end
        can_gram = self._gram_available > 0 and self._gram_in_flight != p.contexts and not begin_gram
        if begin_gram:
            self._gram_end = now + self._gram_token
            self._formed[self._gram_begun] = now + self._gram_words + p.gram_latency
            self._gram_begun += 1

        # Registers.
        self._can_project, self._can_expand, self._can_gram = can_project, can_expand, can_gram
        if expanded:
            for n in range(2):
                self._freed[n] += self._token_words[n]
        for n in range(2):
            self._available[n] += arrived[n] - begin_project
        self._in_flight += begin_project - expanded
        self._words += pushed - gone
        if job.mode.solves:
            self._gram_available += arrived[0] - begin_gram
            self._gram_in_flight += begin_gram - expanded
        if free:
            self._running, self._expanding, self._step = begin_expand or begin_project, begin_expand, 0
            self._projected += begin_project
            self._expanded += begin_expand
        elif issue:
            self._step += 1
        self.cycle += 1
        return CoreStep(ready[0], ready[1], offered, last, gone and self._out == job.tokens * self._token_outputs)

    def _solve(self) -> None:
        """Start of every token whose inputs are known."""
        p, solves = self._params, self._job.mode.solves
        while self._solved in self._loaded and (not solves or self._solved in self._formed):
            token = self._solved
            thread = token // self._lanes % THREADS
            place = token % (self._lanes * THREADS)
            first = max(
                self._loaded[token],
                self._formed[token] if solves else 0,
                p.start_cycles,
                self._thread_free.get(place, 0),
            )
            turn = first + (1 + thread - first) % THREADS
            self._thread_free[place] = turn + THREADS * self._length
            self._done[token] = turn + THREADS * self._length + p.operation_cycles
            self._solved += 1


def core_cycles(config: Config, job: TransportJob) -> int:
    """Cycles from the one in which a job is taken to the one of its last output, without stalls outside."""
    model = TransportCycles(config, job)
    while not model.step(True, True, True).ended:
        pass
    return model.cycle


def stream_cycles(config: Config, jobs: Sequence[TransportJob]) -> list[int]:
    """Cycle of every output beat of ``Transport``, from the first input beat taken, without stalls outside.

    The descriptor takes a cycle a beat and two to be judged; the core's cycle 0 is the second of these. Then words are
    taken as the core takes them. An output word makes its beats one a cycle, the next word is taken with its last.
    When the core is idle the status record follows: two cycles later its first beat, and after its last two more to
    the next descriptor. Input and output cross a register each.
    """
    p = TransportParams(config)
    parts = (
        word_beats(p.factor_word_bits, config.input_bytes), word_beats(p.state_word_bits, config.input_bytes),
    )  # fmt: skip
    out_beats = word_beats(p.state_word_bits, config.output_bytes)
    status_beats = word_beats(8 * STATUS_BYTES, config.output_bytes)
    beats: list[int] = []
    cycle = 1
    for job in jobs:
        cycle += word_beats(8 * DESCRIPTOR_BYTES, config.input_bytes) + 1
        core = TransportCycles(config, job)
        counts = (job.factor_words, job.state_words(p))
        kind = word = part = token = holds = 0
        feeding = idle = False
        while True:
            offers = [feeding and kind == n and part == parts[n] - 1 for n in range(2)]
            sent = holds > 0
            refill = holds <= 1
            if not feeding and token == job.tokens and idle and refill:
                break
            if sent:
                beats.append(cycle + 1)
                holds -= 1
            if not idle:
                step = core.step(offers[0], offers[1], refill)
                if step.o_valid and refill:
                    holds = out_beats
                idle = step.ended
                whole = part == parts[kind] - 1
                if feeding and (not whole or (step.factor_ready, step.state_ready)[kind]):
                    part = 0 if whole else part + 1
                    if whole:
                        word += 1
                        if word == counts[kind]:
                            token += kind
                            kind, word = 1 - kind, 0
                feeding = token < job.tokens
            cycle += 1
        beats += [cycle + 1] * holds
        cycle += 2
        beats += [cycle + 1 + n for n in range(status_beats)]
        cycle += status_beats + 1
    return beats
