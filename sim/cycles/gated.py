"""Cycles of gated attention: every mask row of the geometry side, and the walk that waits for them.

The geometry side does not wait for the walk, but for the start of a run with many rows untaken, so it is stepped by
itself, run by run, as far as the walk asks for rows. Its source never stalls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dtp.config import Config
from dtp.gated import ROW_QUEUE, GatedParams, Pass, Run
from dtp.pruner import PrunerSettings
from dtp.quantise import Head
from sim.cycles.attention import Prediction, predict
from sim.cycles.holonomy import FieldCycles
from sim.cycles.pruner import RowDecisions, head_timing
from sim.cycles.transport import TransportCycles

__all__ = ["GateCycles", "predict_gated"]

CHECK_CYCLES = 2
"""From the last beat of a descriptor, behind the register of the input, to the start of a run."""
QUEUE_READ_CYCLES = 2
"""From the cycle in which a queue in block memory reads a payload to the one in which it is offered."""


def predict_gated(
    config: Config, heads: Sequence[Head], runs: Sequence[tuple[Run, PrunerSettings]], *, start: int = 0
) -> Prediction:
    """The run of gated jobs whose mask rows come from ``runs``; cycle 0 is the one of the first beat of the jobs.

    Parameters
    ----------
    heads: jobs with the blocks that they walk over, :func:`dtp.gated.gated_heads`
    runs: their geometry, with the settings in force
    start: cycle in which the first beat of the first run is taken

    Raises
    ------
    DtpError: what :func:`sim.cycles.attention.predict` refuses.
    """
    return predict(config, heads, GateCycles(config, runs, start=start))


class GateCycles:
    """Mask rows of a sequence of runs: when each is made, and when the walk takes it.

    Members
    -------
    made: cycle in which each row entered the queue of rows
    taken: cycle in which each was taken
    """

    def __init__(self, config: Config, runs: Sequence[tuple[Run, PrunerSettings]], *, start: int = 0) -> None:
        self._config = config
        self._runs = deque(enumerate(runs))
        self._next = start + 1  # first cycle in which a beat of the next run is behind the input's register
        self._reads: list[int] = []
        self.made: list[int] = []
        self.taken: list[int] = []

    def take(self, earliest: int) -> int:
        """The cycle in which the next row is taken, ``earliest`` the first in which the walk would."""
        number = len(self.taken)
        while len(self.made) <= number:
            self._step_run()
        before = self.taken[-1] if self.taken else 0
        self._reads.append(max(self.made[number] + 1, before))
        cycle = max(earliest, self._reads[-1] + QUEUE_READ_CYCLES)
        self.taken.append(cycle)
        return cycle

    def finish(self) -> list[int]:
        """Cycles of all rows that are made; for runs whose rows are taken as they come."""
        while self._runs or len(self.taken) < len(self.made):
            self.take(0)
        return self.made

    def _waiting(self, now: int) -> int:
        """Rows behind the one that is offered."""
        return sum(cycle < now for cycle in self.made) - sum(cycle < now for cycle in self._reads)

    def _step_run(self) -> None:
        number, (run, settings) = self._runs.popleft()
        params = GatedParams(self._config)
        # A descriptor is taken when the run before has been answered; its run starts when there is room.
        now = max(self._next, self._free) + params.descriptor_beats - 1 + CHECK_CYCLES
        while number and self._waiting(now) >= ROW_QUEUE // 2:
            now += 1
        stepped = _RunCycles(self._config, run, settings, number, now)
        self._next, self._free = stepped.step_all()
        self.made += stepped.made

    _free = 0


class _Queue:
    """``BlockQueue`` without its payloads."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._level = 0
        self._read = False
        self.valid = False

    @property
    def ready(self) -> bool:
        return self._level < self._depth

    def step(self, push: bool, pop: bool) -> None:
        reads = self._level > 0 and not self._read and (not self.valid or pop)
        self.valid = self._read or (self.valid and not pop)
        self._read = reads
        self._level += push - reads


class _Place:
    """Where a stream of words is: pass, token, word, slot. Slots of a word come one by one unless it is ``paired``."""

    def __init__(self, run: Run, passes: Sequence[Pass], paired: bool) -> None:
        self._run, self._passes, self._paired = run, passes, paired
        self.number = self._token = self._word = 0
        self.second = False

    @property
    def done(self) -> bool:
        """Nothing is left."""
        return self.number == len(self._passes)

    @property
    def step(self) -> int:
        """Head of the pass, their number where nothing is left."""
        return self._run.heads if self.done else self._passes[self.number].step

    @property
    def plain(self) -> bool:
        """The pass has the slot of the head's own transport."""
        return not self.done and self._passes[self.number].plain

    @property
    def transposed(self) -> bool:
        """The pass has the slot of the transpose."""
        return not self.done and self._passes[self.number].transposed

    @property
    def slot_last(self) -> bool:
        """The slot is the last one of its word."""
        return self._paired or self.second or not (self.plain and self.transposed)

    @property
    def word_last(self) -> bool:
        """The word is the last one of its token."""
        return self._word == self._run.words - 1

    @property
    def first_slot(self) -> bool:
        """The slot, or one of the pair, is the head's own transport."""
        return self.plain and (self._paired or not self.second)

    @property
    def second_slot(self) -> bool:
        """The slot, or one of the pair, is the transpose."""
        return self.transposed and self.slot_last

    def move(self) -> bool:
        """A slot further; whether a pass ends."""
        self.second = not self.slot_last
        if self.second:
            return False
        self._word = 0 if self.word_last else self._word + 1
        self._token += self._word == 0
        ends = self._token == self._run.tokens
        if ends:
            self._token, self.number = 0, self.number + 1
        return ends


class _RunCycles:
    """One run from the cycle in which it starts; rows are taken from the pruner as they come."""

    def __init__(self, config: Config, run: Run, settings: PrunerSettings, number: int, start: int) -> None:
        self._config, self._run, self._settings, self._number, self._start = config, run, settings, number, start
        p = self._p = GatedParams(config)
        self._blocks = run.blocks(config)
        self._passes = run.passes(config)
        self._paired = p.transport.vectors == 2
        # Jobs that the engine is still to be given; one starts when the one before has ended.
        self._jobs = deque(run.transport_jobs(config) if run.holonomy else ())
        self._core = TransportCycles(config, self._jobs.popleft()) if self._jobs else None
        self._idle = False
        self._factors_wait = self._states_wait = False  # for the job of their pass
        self._field = FieldCycles(p.field)
        self._table = _Queue(2 * p.max_blocks**2)
        # Input: what comes next, and how far it is.
        self._sections = self._order()
        self._count = self._lane = 0
        self._probes = 0
        self._resume = start + 1
        self._ended: int | None = None
        # Between engine and field: words of the engine's states and outputs, tokens to be read.
        self._into, self._out = (_Place(run, self._passes, self._paired) for _ in range(2))
        self._used = self._used_next = self._there = 0  # pass whose probe is in use, as the input knows it
        self._offered = self._given = self._written = False
        # Scores: the head that is gated.
        self._head = 0
        self._look = start + 1
        self._taken = 0
        self._decisions: RowDecisions | None = None
        self._accepted: list[int] = []
        self.made: list[int] = []
        self._answered = 0

    def _order(self) -> deque[tuple[str, int, int]]:
        """Sections of the run: kind, pass, words or scores."""
        run, blocks = self._run, self._blocks
        found: deque[tuple[str, int, int]] = deque()
        for n, one in enumerate(self._passes):
            if run.table and one.transposed:
                found.append(("table", n, blocks * blocks))
            if run.holonomy:
                if one.plain:
                    found.append(("probe", n, run.words))
                found.append(("factors", n, run.tokens * run.words * run.groups))
        return found

    def _turns(self, number: int) -> bool:
        """The pass behind this one is another job of the engine."""
        if self._paired or number + 1 == len(self._passes):
            return False
        one, two = self._passes[number : number + 2]
        return one.slots != two.slots

    def step_all(self) -> tuple[int, int]:
        """First cycle in which a beat of another run is there, and in which its descriptor is taken."""
        now = self._start
        while self._head < self._run.heads or self._ended is None:
            self._step(now)
            now += 1
        return self._ended, self._answered

    def _step(self, now: int) -> None:
        run, p = self._run, self._p
        kind = self._sections[0][0] if self._sections and now >= self._resume else "none"

        # Pruner: whether it takes a score.
        gates = self._gate(now)

        # Engine and field.
        factor_ready = False
        if self._core is not None and (not self._idle or self._jobs):
            starts = self._idle
            if starts:
                self._core = TransportCycles(self._config, self._jobs.popleft())
            passes = self._out.second_slot
            offers = self._core.offers
            field_step = self._field_step(now, self._out.transposed, offers and passes, gates)
            o_ready = now > self._start and (not passes or field_step)
            whole = kind == "factors" and self._count == p.factor_beats - 1
            fed = whole and not self._factors_wait
            state_valid = self._offered
            shown = self._core.step(fed, state_valid, o_ready)
            factor_ready = fed and shown.factor_ready
            takes = state_valid and shown.state_ready
            written = self._route(offers and o_ready)
            self._feed(now, takes, written)
            self._idle = shown.ended
            if starts:
                self._factors_wait = self._states_wait = False
        elif run.holonomy:
            self._field_step(now, False, False, gates)

        # Input.
        push = False
        if kind == "table":
            push = self._table.ready
        self._table.step(push, gates and run.table)
        self._load(now, kind, push, factor_ready)

    def _field_step(self, now: int, scored: bool, word_valid: bool, score_ready: bool) -> bool:
        offers = now > self._start and scored and not self._given
        step = self._field.step(self._run.field_job() if offers else None, word_valid, score_ready)
        if step.job_taken:
            self._given = True
        return step.word_taken

    def _route(self, gone: bool) -> bool:
        """A word leaves the engine; whether a token is now in the memory of transported probes."""
        if not gone:
            return False
        out = self._out
        kept = out.first_slot and out.word_last
        if out.move():
            self._given = False
        return kept

    def _feed(self, now: int, takes: bool, written: bool) -> None:
        into = self._into
        available = (
            now > self._start
            and not into.done
            and not self._states_wait
            and (not into.plain or self._probes != into.step)
            and (not into.transposed or self._there > 0)
        )
        read = False
        if takes:
            read = into.second_slot and into.word_last
            number = into.number
            if into.move():
                self._states_wait = self._turns(number)
        self._offered = available and not takes
        self._there += self._written - read
        self._written = written

    def _load(self, now: int, kind: str, push: bool, factor_ready: bool) -> None:
        """The input moves on."""
        p = self._p
        ends = False
        if kind == "table":
            self._lane += push
            ends = self._lane == self._blocks**2
        elif kind in ("probe", "factors"):
            beats = p.probe_beats if kind == "probe" else p.factor_beats
            whole = self._count == beats - 1
            step = self._passes[self._sections[0][1]].step
            moves = step <= self._used + 1 if kind == "probe" else not whole or factor_ready
            if moves:
                self._count = 0 if whole else self._count + 1
                self._lane += whole
            ends = self._lane == self._sections[0][2]
        self._used, self._used_next = self._used_next, self._into.step
        if not ends:
            return
        self._lane = 0
        _, number, _ = self._sections.popleft()
        self._probes += kind == "probe"
        if not self._sections:
            self._ended = now + 1
        elif self._sections[0][1] != number:
            self._resume = now + 2
            self._factors_wait = self._turns(number)

    def _gate(self, now: int) -> bool:
        """Whether a score goes into the pruner."""
        run, config = self._run, self._config
        if self._head == run.heads or now <= self._look:
            return False
        if self._decisions is None:
            command = run.command(config, self._settings, self._head, self._number)
            self._decisions = RowDecisions(self._p.pruner, command)
        if self._taken == self._blocks**2:
            return False
        there = (not run.holonomy or self._field.offers) and (not run.table or self._table.valid)
        begins = self._taken % self._blocks == 0
        if not there or (begins and now < self._decisions.first_score):
            return False
        self._taken += 1
        if self._taken % self._blocks == 0:
            self._accepted.append(now)
            self._decisions.add(now)
        if self._taken == self._blocks**2:
            self._answer()
        return True

    def _answer(self) -> None:
        """All scores of a head are in: its rows, its report, the next command."""
        run, config = self._run, self._config
        command = run.command(config, self._settings, self._head, self._number)
        count = self._blocks**2
        timing = head_timing(
            self._p.pruner, command, self._look, sent=(count * run.holonomy, count * run.table), accepted=self._accepted
        )
        self.made += [int(cycle) for cycle in timing.rows]
        self._look = timing.next_command
        self._answered = timing.next_command
        self._head += 1
        self._taken, self._decisions, self._accepted = 0, None, []
