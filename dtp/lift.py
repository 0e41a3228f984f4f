"""The lift unit: parameters, programs and integer golden model.

The unit scales queries, makes the lifted lanes of queries and keys [RA (15), (23), by the Gram lifting] and the keys'
biases. It is a small vector machine: ``lift_tokens`` lanes, each with one multiplier, one accumulator and a register
file, all doing the same instruction; a lane holds one token (or, for queries, one of the segments of a row).

    acc  = (init if first else acc) + register[a] · register[b]
    then one of: register[dst] = acc >> (a fixed shift), a row operand out, a key lane or bias out

``init`` carries the rounding constant of the shift that follows, so every shift rounds half up. Programs are made
here, with the distances that the pipeline asks for; an instruction that takes an input word waits for it, which only
makes distances longer.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from dtp.config import BIAS_BITS, REGISTER_BITS, SCALE_BITS, Config
from dtp.errors import must
from dtp.fixed import Int, bits_for_magnitude, overflows, round_shift, saturate
from dtp.job import Job, pad_factors

READ_CYCLE = 1
"""Cycle after issue in which the registers are read."""
DUMP_CYCLES = 3
"""From the selection of a held token to the write port of the key memories."""
START_CYCLES = 3
"""From the start of a program to the issue of its first instruction."""
SATURATION_CYCLES = 3
"""From a result to the counted saturation."""


class Shift(enum.IntEnum):
    """Fixed right shift of an accumulator on its way to a register."""

    METRIC = 0
    VECTOR = 1
    NORM = 2


class Emit(enum.IntEnum):
    """A row operand leaves to the query memory."""

    NONE = 0
    PLAIN = 1
    LIFTED = 2


class Dump(enum.IntEnum):
    """Kind of a held value: which per-job shift, and which memory."""

    VECTOR = 0
    OUTER = 1
    METRIC = 2
    BIAS = 3


class Loop(enum.IntEnum):
    """How often an instruction is issued."""

    ONCE = 0
    #: once a word until the count of the section is used up (not at all when it is 0)
    WORDS = 1
    #: once a word for ever; another start ends it
    FOREVER = 2
    #: once, as soon as a descriptor has been taken
    DESCRIPTOR = 3


class Init(enum.IntEnum):
    """What an accumulator starts from."""

    ZERO = 0
    HALF_METRIC = 1
    HALF_VECTOR = 2
    HALF_NORM = 3
    HALF_PLAIN = 4
    HALF_LIFTED = 5
    LOW_BYTE = 6  # undoes the −128 of a bias's low byte
    ONE = 7
    BYTE = 8  # 256
    # With the job's scales 16 is set, with doubled ones 8, below stands the number of the scale.
    QUERY_SCALE = 16
    METRIC_SCALE = 17
    LIFT_VECTOR_SCALE = 18
    LIFT_METRIC_SCALE = 19
    LIFT_OUTER_SCALE = 20
    BIAS_SCALE = 21
    NORM_SCALE = 22
    METRIC_NORM_SCALE = 23
    LIFT_METRIC_SCALE_TWICE = 27
    LIFT_OUTER_SCALE_TWICE = 28

    @property
    def job_field(self) -> str | None:
        """The field of the job that it carries, if any."""
        name = self.name.lower().removesuffix("_twice")
        return name if name.endswith("_scale") else None

    @property
    def twice(self) -> bool:
        """Off-diagonal lanes of a symmetric matrix count twice, on the query's side."""
        return self.name.endswith("_TWICE")


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``a``, ``b``, ``dst`` are register numbers.

    Parameters
    ----------
    a, b: factors
    dst: register of ``take`` or ``write``; of a ``hold``, lane · 4 + kind
    take: the next input word goes to ``dst`` (before ``a`` and ``b`` are read)
    first: start from ``init``
    write: the result goes to ``dst`` through ``shift``
    segments: segments whose register is written, one bit each
    emit: the result leaves as a row operand
    hold: the result goes to the hold of its lane's port
    dump: with the hold, all held lanes start to leave, S tokens a cycle
    loop: how often
    flush: the taken word is the last of its entry (in a loop: the last one is)
    wait: do nothing for ``a`` + 1 cycles
    end: last of its program
    """

    a: int = 0
    b: int = 0
    dst: int = 0
    take: bool = False
    first: bool = False
    init: Init = Init.ZERO
    write: bool = False
    shift: Shift = Shift.METRIC
    segments: int = -1
    emit: Emit = Emit.NONE
    hold: bool = False
    dump: bool = False
    loop: Loop = Loop.ONCE
    flush: bool = False
    wait: bool = False
    end: bool = False

    @property
    def cycles(self) -> int:
        """Cycles that it takes when nothing is missing; a loop counts once."""
        return self.a + 1 if self.wait else 1


@dataclass
class _Chain:
    """Products summed by neighbouring instructions, and what becomes of the sum."""

    steps: list[Instruction]

    @property
    def last(self) -> Instruction:
        return self.steps[-1]


@dataclass(frozen=True)
class Program:
    """Instructions from ``start`` of the program memory on."""

    name: str
    start: int
    code: tuple[Instruction, ...]


@dataclass(frozen=True)
class LiftParams:
    """Widths, registers and programs of the lift unit of a configuration."""

    config: Config

    # ---- widths ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """R."""
        return self.config.max_frame_rank

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(ρ, σ) of the symmetric lanes: upper triangle, row-major."""
        return [(row, column) for row in range(self.rank) for column in range(row, self.rank)]

    @property
    def query_shift(self) -> int:
        """Right shift of a scaled plain lane; with it the scaling alone cannot overflow."""
        return self.config.operand_bits + SCALE_BITS - self.config.row_bits

    @property
    def lifted_shift(self) -> int:
        """Right shift of a lifted row lane."""
        return REGISTER_BITS

    @property
    def vector_gain(self) -> int:
        """Left shift of a 8-bit a before it is scaled to a lifted row lane, so that the lane can use its width."""
        return 8 if self.config.operand_bits == 8 else 0

    @cached_property
    def _bounds(self) -> dict[str, int]:
        """Shifts to registers, and the largest magnitude of what they then hold."""
        operand = 1 << (self.config.operand_bits - 1)
        most: dict[str, int] = {}

        def shift(*sums: int) -> int:
            amount = 0
            while max(sums) + (1 << amount >> 1) >= 1 << (REGISTER_BITS - 1 + amount):
                amount += 1
            return amount

        metric, outer = self.config.metric_rank * operand * operand, operand * operand
        most["metric_shift"] = shift(metric, outer)
        most["metric"] = int(round_shift(metric, most["metric_shift"]))
        most["outer"] = int(round_shift(outer, most["metric_shift"]))
        vector = self.rank * most["metric"] * operand
        amount = shift(vector)
        while True:
            held = int(round_shift(vector, amount))
            if shift(self.rank * operand * held) <= amount:
                break
            amount += 1
        most["vector_shift"], most["vector"] = amount, held
        most["metric_norm"] = int(round_shift(self.rank * operand * held, amount))
        norm = self.config.max_width * operand * operand
        most["norm_shift"] = shift(norm)
        most["norm"] = int(round_shift(norm, most["norm_shift"]))
        return most

    @property
    def metric_register_shift(self) -> int:
        """Right shift of M = C Cᵀ to a register."""
        return self._bounds["metric_shift"]

    @property
    def vector_register_shift(self) -> int:
        """Right shift of Mx to a register."""
        return self._bounds["vector_shift"]

    @property
    def outer_register_shift(self) -> int:
        """Right shift of a aᵀ of a query to a register: that of M."""
        return self._bounds["metric_shift"]

    @property
    def metric_norm_register_shift(self) -> int:
        """Right shift of u = b·Mb to a register: that of Mx."""
        return self._bounds["vector_shift"]

    @property
    def norm_register_shift(self) -> int:
        """Right shift of ‖k‖² to a register."""
        return self._bounds["norm_shift"]

    def register_shift(self, shift: Shift) -> int:
        """Right shift of a kind of result."""
        name = {Shift.METRIC: "metric_shift", Shift.VECTOR: "vector_shift", Shift.NORM: "norm_shift"}[shift]
        return self._bounds[name]

    @cached_property
    def accumulator_bits(self) -> int:
        """Signed width of an accumulator; no job overflows it."""
        bounds, rank = self._bounds, self.rank
        operand = 1 << (self.config.operand_bits - 1)
        scale, unsigned_scale = 1 << (SCALE_BITS - 1), 1 << SCALE_BITS
        bias = 1 << 15
        sums = (
            self.config.max_width * operand * operand,
            self.config.metric_rank * operand * operand,
            rank * bounds["metric"] * operand,
            rank * bounds["vector"] * operand,
            operand * unsigned_scale + bounds["vector"] * scale,
            max(bounds["metric"], bounds["outer"]) * 2 * scale,
            bounds["vector"],
            scale * (bias + bounds["norm"] + bounds["metric_norm"]),
            2 * scale << self.metric_register_shift,
            unsigned_scale << self.metric_register_shift,
        )
        halves = max(self.lifted_shift, self.query_shift, self.vector_register_shift, self.norm_register_shift)
        return bits_for_magnitude(max(sums) + (1 << (halves - 1)))

    # ---- constants -------------------------------------------------------------------------------------------

    def init_value(self, init: Init) -> int:
        """The number of an ``init`` that no job changes; job scales stand at :attr:`metric_register_shift`."""
        shift = self.metric_register_shift
        return {
            Init.ZERO: 0,
            Init.HALF_METRIC: 1 << shift >> 1,
            Init.HALF_VECTOR: 1 << self.vector_register_shift >> 1,
            Init.HALF_NORM: 1 << self.norm_register_shift >> 1,
            Init.HALF_PLAIN: 1 << self.query_shift >> 1,
            Init.HALF_LIFTED: 1 << self.lifted_shift >> 1,
            Init.LOW_BYTE: 128 << shift,
            Init.ONE: 1 << shift,
            Init.BYTE: 256 << shift,
        }[init]

    # ---- registers -------------------------------------------------------------------------------------------

    @cached_property
    def registers(self) -> dict[str, int]:
        """Number of every register. ``zero`` is never written; registers start as 0."""
        rank, segments = self.rank, self.config.segments
        names = ["zero", "_", "word0", "word1", "query_scale", "one", "byte", "bias_scale", "norm_scale"]
        names += ["metric_norm_scale", "low", "high", "bias", "norm", "metric_norm"]
        names += [f"x{n}" for n in range(rank)]
        names += [f"c{n}_{i}" for n in range(rank) for i in range(self.config.metric_rank)]
        names += [f"m{row}_{column}" for row, column in self.pairs]
        names += [f"outer{row}_{column}" for row, column in self.pairs]
        names += [f"mx{n}" for n in range(rank)]
        names += [f"fine{n}" for n in range(rank)] if self.vector_gain else []
        for kind in ("metric", "vector", "lift_metric", "lift_metric2", "lift_outer", "lift_outer2"):
            names += [f"{kind}_scale_{s}" for s in range(segments)]
        return {name: number for number, name in enumerate(name for name in names)}

    @property
    def register_bits(self) -> int:
        """Bits of a register number."""
        return (len(self.registers) - 1).bit_length()

    # ---- programs --------------------------------------------------------------------------------------------

    @property
    def result_cycles(self) -> int:
        """From the issue of an instruction to its result: the cycle in which it is written to a register, a memory
        or a hold.

        Issue and word write 0, register read 1, its output register (``registered_memories``), then multiplier
        operands, product, sum, result.
        """
        return 6 if self.config.registered_memories else 5

    @property
    def drain_cycles(self) -> int:
        """From the last word of a job until its last result is in memory and counted."""
        return self.result_cycles + SATURATION_CYCLES + 1

    @property
    def query_words(self) -> int:
        """First words of a lifting group, those with one of the first R lanes: not part of the loop."""
        return -(-self.rank // self.config.segments)

    @property
    def lifted_words(self) -> int:
        """Words of the lifted passes of a group."""
        return self.config.lifted_passes * self.config.pass_steps

    @property
    def dump_steps(self) -> int:
        """Cycles in which a held lane leaves: S tokens each."""
        return min(self.config.rows, self.config.max_tokens // self.config.segments)

    @cached_property
    def programs(self) -> dict[str, Program]:
        """``plain`` (scale, then queries for ever), ``queries`` (plain ones again), ``bias_constants``,
        ``lift_constants``, ``lift_queries``, ``keys``, ``lift_keys``."""
        make = _Maker(self)
        plain = make.plain()
        programs: dict[str, Program] = {}
        start = 0
        for name, code in (
            ("plain", plain),
            ("bias_constants", make.constants(lift=False)),
            ("lift_constants", make.constants(lift=True)),
            ("lift_queries", make.queries()),
            ("keys", make.keys(lift=False)),
            ("lift_keys", make.keys(lift=True)),
        ):
            programs[name] = Program(name, start, tuple(code))
            start += len(code)
        programs["queries"] = Program("queries", len(plain) - 1, tuple(plain[-1:]))
        return programs

    @cached_property
    def code(self) -> list[Instruction]:
        """The program memory."""
        ordered = sorted((p for p in self.programs.values() if p.name != "queries"), key=lambda p: p.start)
        return [instruction for program in ordered for instruction in program.code]

    @cached_property
    def layout(self) -> dict[str, int]:
        """Fields of an encoded instruction and their widths, lowest first."""
        lanes = 4 * self.config.lifted_lanes
        return {
            "a": self.register_bits,
            "b": self.register_bits,
            "dst": max(self.register_bits, (lanes - 1).bit_length()),
            "take": 1,
            "first": 1,
            "init": max(Init).bit_length(),
            "write": 2,  # 0 no, else shift + 1
            "segments": self.config.segments if self.config.segments > 1 else 0,
            "emit": 2,
            "hold": 1,
            "dump": 1,
            "loop": 2,
            "flush": 1,
            "wait": 1,
            "end": 1,
        }

    def encode(self, instruction: Instruction) -> int:
        """An instruction as a word of the program memory."""
        word, place = 0, 0
        for name, bits in self.layout.items():
            value = int(getattr(instruction, name))
            if name == "write" and instruction.write:
                value = int(instruction.shift) + 1
            word |= (value & ((1 << bits) - 1)) << place
            place += bits
        return word


@dataclass
class _Maker:
    """Writes the programs of a configuration."""

    params: LiftParams
    register: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.register = self.params.registers

    def _product(self, a: str, b: str, **more: object) -> Instruction:
        return replace(Instruction(a=self.register[a], b=self.register[b]), **more)  # type: ignore[arg-type]

    def _take(self, name: str, **more: object) -> Instruction:
        """Take a word and add nothing."""
        return self._product("zero", "zero", take=True, dst=self.register[name], **more)

    def _sum(self, products: Iterable[tuple[str, str]], init: Init, **last: object) -> _Chain:
        steps = [self._product(a, b) for a, b in products]
        steps[0] = replace(steps[0], first=True, init=init)
        steps[-1] = replace(steps[-1], **last)  # type: ignore[arg-type]
        return _Chain(steps)

    def _result(self, products: Iterable[tuple[str, str]], name: str, shift: Shift, init: Init) -> _Chain:
        return self._sum(products, init, write=True, dst=self.register[name], shift=shift)

    def _constant(self, name: str, init: Init, segments: int = -1) -> Instruction:
        return self._product(
            "zero", "zero", first=True, init=init, write=True, dst=self.register[name], segments=segments
        )

    # ---- programs

    def plain(self) -> list[Instruction]:
        """The query scale, once the descriptor is there, then queries for ever."""
        scale = replace(self._constant("query_scale", Init.QUERY_SCALE), loop=Loop.DESCRIPTOR)
        loop = replace(self._query_word(), loop=Loop.FOREVER)
        return [*self._spaced([scale]), Instruction(wait=True, a=self.params.result_cycles - 1), loop]

    def _query_word(self) -> Instruction:
        return self._product(
            "word0", "query_scale", dst=self.register["word0"], take=True,
            first=True, init=Init.HALF_PLAIN, emit=Emit.PLAIN,
        )  # fmt: skip

    def constants(self, *, lift: bool) -> list[Instruction]:
        """The job's multipliers to registers."""
        code = [self._constant("one", Init.ONE)]
        if self.params.config.operand_bits == 8:
            code.append(self._constant("byte", Init.BYTE))
        code += [self._constant("bias_scale", Init.BIAS_SCALE), self._constant("norm_scale", Init.NORM_SCALE)]
        if lift:
            code.append(self._constant("metric_norm_scale", Init.METRIC_NORM_SCALE))
            for name, init in sorted(self._lane_scales().items(), key=lambda item: item[1]):
                code.append(self._constant(name, init, 1 << int(name.rpartition("_")[2])))
        return _ended(code, self.params.result_cycles)

    def _lane_scales(self) -> dict[str, Init]:
        """Registers that hold a scale in one segment and 0 in the others, as far as they are used."""
        scales = {f"metric_scale_{n % self.params.config.segments}": Init.METRIC_SCALE for n in range(self.params.rank)}
        for lane in range(self.params.config.lifted_lanes):
            _, scale, init = self._lifted_lane(lane)
            scales[scale] = init
        return scales

    def _lifted_lane(self, lane: int) -> tuple[str, str, Init]:
        """Register, scale register and scale of a lifted query lane."""
        segment = lane % self.params.config.segments
        rank, pairs = self.params.rank, self.params.pairs
        if lane < rank:
            vector = "fine" if self.params.vector_gain else "x"
            return f"{vector}{lane}", f"vector_scale_{segment}", Init.LIFT_VECTOR_SCALE
        outer, index = divmod(lane - rank, len(pairs))
        row, column = pairs[index]
        twice = row != column
        kind, value = ("lift_outer", "outer") if outer else ("lift_metric", "m")
        init = Init[f"{kind}_scale{'_twice' if twice else ''}".upper()]
        return f"{value}{row}_{column}", f"{kind}{'2' if twice else ''}_scale_{segment}", init

    def _metric(self) -> list[_Chain]:
        inner = range(self.params.config.metric_rank)
        return [
            self._result(
                [(f"c{row}_{i}", f"c{column}_{i}") for i in inner],
                f"m{row}_{column}", Shift.METRIC, Init.HALF_METRIC,
            )
            for row, column in self.params.pairs
        ]  # fmt: skip

    def _metric_vector(self) -> list[_Chain]:
        rank = range(self.params.rank)
        return [
            self._result(
                [(f"m{min(n, k)}_{max(n, k)}", f"x{k}") for k in rank], f"mx{n}", Shift.VECTOR, Init.HALF_VECTOR
            )
            for n in rank
        ]

    def _factor_takes(self) -> list[Instruction]:
        inner = range(self.params.config.metric_rank)
        return [self._take(f"c{n}_{i}") for n in range(self.params.rank) for i in inner]

    def queries(self) -> list[Instruction]:
        """A lifting group: factor batch, plain words, lifted words."""
        config, rank = self.params.config, self.params.rank
        takes = [self._take(f"x{n}") for n in range(rank)] + self._factor_takes()
        takes[-1] = replace(takes[-1], flush=True)
        outer = [
            self._result([(f"x{row}", f"x{column}")], f"outer{row}_{column}", Shift.METRIC, Init.HALF_METRIC)
            for row, column in self.params.pairs
        ]
        fine = [
            self._result([(f"x{n}", "byte")], f"fine{n}", Shift.METRIC, Init.HALF_METRIC)
            for n in range(rank if self.params.vector_gain else 0)
        ]
        words: list[Instruction] = []
        for word in range(self.params.query_words):
            lanes = range(word * config.segments, min(rank, (word + 1) * config.segments))
            name = f"word{word % 2}"
            chain = [self._product(name, "query_scale", take=True, dst=self.register[name])]
            chain += [self._product(f"mx{n}", f"metric_scale_{n % config.segments}") for n in lanes]
            chain[0] = replace(chain[0], first=True, init=Init.HALF_PLAIN)
            chain[-1] = replace(chain[-1], emit=Emit.PLAIN)
            words += chain
        words.append(replace(self._query_word(), loop=Loop.WORDS))
        lifted: list[Instruction] = []
        for word in range(self.params.lifted_words):
            lanes = range(word * config.segments, min(config.lifted_lanes, (word + 1) * config.segments))
            products = [self._lifted_lane(n)[:2] for n in lanes] or [("zero", "zero")]
            lifted += self._sum(products, Init.HALF_LIFTED, emit=Emit.LIFTED).steps
        chains = self._arranged(self._spaced(takes), [*self._metric(), *outer, *fine, *self._metric_vector()])
        return _ended(self._spaced([*chains, *words, *lifted]), 0)

    def keys(self, *, lift: bool) -> list[Instruction]:
        """A factor batch of keys: norm, and if ``lift`` the lifted lanes; then the bias."""
        config, rank = self.params.config, self.params.rank if lift else 0
        head = [replace(self._product("zero", "zero"), first=True, init=Init.HALF_NORM)]
        head += [self._product(f"x{n}", f"x{n}", take=True, dst=self.register[f"x{n}"]) for n in range(rank)]
        head.append(self._product("word0", "word0", take=True, dst=self.register["word0"], loop=Loop.WORDS))
        head += self._factor_takes() if lift else []
        if config.operand_bits == 8:
            head += [self._take("low"), self._take("high", flush=True)]
        else:
            head.append(self._take("bias", flush=True))
        head.append(self._product("zero", "zero", write=True, dst=self.register["norm"], shift=Shift.NORM))
        chains: list[_Chain] = []
        if config.operand_bits == 8:
            word = [("high", "byte"), ("low", "one")]
            chains.append(self._result(word, "bias", Shift.METRIC, Init.LOW_BYTE))
        if lift:
            chains += [*self._metric(), *self._metric_vector()]
            products = [(f"x{n}", f"mx{n}") for n in range(rank)]
            chains.append(self._result(products, "metric_norm", Shift.VECTOR, Init.HALF_VECTOR))
        beta = [("bias", "bias_scale"), ("norm", "norm_scale")]
        beta += [("metric_norm", "metric_norm_scale")] if lift else []
        dumps = self._lane_dumps() if lift else []
        dumps.append([self._sum(beta, Init.ZERO, hold=True, dump=True, dst=int(Dump.BIAS))])
        code = self._arranged(head, chains, dumps)
        return _ended(code, self.params.result_cycles + self.params.dump_steps + DUMP_CYCLES)

    def _lane_dumps(self) -> list[list[_Chain]]:
        """Lifted key lanes in groups of ``lift_ports``; groups that need Mb last."""
        config, rank = self.params.config, self.params.rank
        groups: list[list[_Chain]] = []
        for low in range(0, config.lifted_lanes, config.lift_ports):
            lanes = range(low, min(config.lifted_lanes, low + config.lift_ports))
            group: list[_Chain] = []
            for lane in lanes:
                if lane < rank:
                    product, kind = (f"mx{lane}", "one"), Dump.VECTOR
                else:
                    metric, index = divmod(lane - rank, len(self.params.pairs))
                    row, column = self.params.pairs[index]
                    product = (f"m{row}_{column}", "one") if metric else (f"x{row}", f"x{column}")
                    kind = Dump.METRIC if metric else Dump.OUTER
                chain = self._sum([product], Init.ZERO, hold=True, dump=lane == lanes[-1], dst=4 * lane + int(kind))
                group.append(chain)
            groups.append(group)
        return sorted(groups, key=lambda group: min(chain.last.dst // 4 for chain in group) < rank)

    def _spaced(self, code: list[Instruction], dump_steps: int = 0) -> list[Instruction]:
        return _spaced(code, self.params.result_cycles, dump_steps)

    def _arranged(
        self, head: list[Instruction], chains: list[_Chain], dumps: list[list[_Chain]] | None = None
    ) -> list[Instruction]:
        """``head``, then the chains, the one that can start first always next; dumps keep their order."""
        code = self._spaced(head)
        waiting = list(chains)
        pending = [chain for group in dumps or [] for chain in group]
        while waiting or pending:
            options = waiting + pending[:1]
            # What is read must be older, unless nothing that still waits makes it.
            missing = {chain.last.dst for chain in waiting if chain.last.write}
            options = [chain for chain in options if not any(s.a in missing or s.b in missing for s in chain.steps)]
            # A dump goes first among equals: its port is what all wait for in the end.
            starts = [
                (_length(self._spaced([*code, *c.steps], self.params.dump_steps)) - len(c.steps), not c.last.hold, n)
                for n, c in enumerate(options)
            ]
            chosen = options[min(range(len(options)), key=lambda n: starts[n])]
            code = self._spaced([*code, *chosen.steps], self.params.dump_steps)
            if chosen.last.hold:
                pending.remove(chosen)
            else:
                waiting.remove(chosen)
        return code


def _length(code: list[Instruction]) -> int:
    return sum(instruction.cycles for instruction in code)


def _ended(code: list[Instruction], drain: int) -> list[Instruction]:
    """The code with an end ``drain`` cycles after its last instruction."""
    if drain == 0:
        return [*code[:-1], replace(code[-1], end=True)]
    return [*code, Instruction(wait=True, a=drain - 1, end=True)]


def _spaced(code: list[Instruction], result_cycles: int, dump_steps: int) -> list[Instruction]:
    """The code with waits where the pipeline needs them; waits that are there already are kept.

    A stall only delays an instruction and all after it, so that a least distance stays one. What must not happen is
    that the delayed one meets an earlier result at the register's only write port: a take comes after all results.
    """
    placed: list[Instruction] = []
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    result, dumped, now = -result_cycles - 1, -(1 << 20), 0
    for instruction in code:
        earliest = now
        if instruction.wait:
            placed.append(instruction)
            now += instruction.cycles
            continue
        sources = {instruction.a, instruction.b} - ({instruction.dst} if instruction.take else set())
        for source in sources:
            if source in written:
                earliest = max(earliest, written[source] + result_cycles + 1 - READ_CYCLE)
        if instruction.take:
            earliest = max(earliest, result + result_cycles + 1)
            if instruction.dst in read:
                earliest = max(earliest, read[instruction.dst] + READ_CYCLE + 1)
        if instruction.hold:
            earliest = max(earliest, dumped + dump_steps)
        if earliest > now:
            placed.append(Instruction(wait=True, a=earliest - now - 1))
        placed.append(instruction)
        now = earliest
        for source in (instruction.a, instruction.b):
            read[source] = now
        if instruction.write:
            written[instruction.dst] = result = now
        if instruction.dump:
            dumped = now
        now += 1
    return placed


# ---- golden model -------------------------------------------------------------------------------------------------


def _symmetric(params: LiftParams, matrix: Int) -> Int:
    """(…, R, R) as its upper triangle."""
    rows = [row for row, _ in params.pairs]
    columns = [column for _, column in params.pairs]
    return matrix[..., rows, columns]


def _metric(params: LiftParams, factors: Int) -> Int:
    """M = C Cᵀ as registers hold it, (L, R, R)."""
    return round_shift(factors @ factors.transpose(0, 2, 1), params.metric_register_shift)


def _metric_vector(params: LiftParams, metric: Int, vector: Int) -> Int:
    """Mx as registers hold it, (L, R)."""
    return round_shift(np.einsum("lij,lj->li", metric, vector), params.vector_register_shift)


def _plain_lanes(config: Config, job: Job, name: str, array: ArrayLike) -> Int:
    given = np.asarray(array, dtype=np.int64)
    if given.shape != (job.tokens, job.width):
        raise must("lift", name, f"of shape {(job.tokens, job.width)}", given.shape)
    return np.pad(given, ((0, 0), (0, job.chunks(config) * config.block - job.width)))


def lift_queries(config: Config, job: Job, queries: ArrayLike, factors: ArrayLike | None) -> tuple[Int, int]:
    """Row operands of a head's queries.

    Parameters
    ----------
    queries: (L, d) integers of ``operand_bits``
    factors: C, (L, R, r) integers of ``operand_bits``, for a lifting job

    Returns
    -------
    (L, passes · block): C·block plain lanes of ``row_bits``, for a lifting job then those of ``lifted_row_bits``
    [lift_vector_scale·a, lift_metric_scale·M, lift_outer_scale·aaᵀ, 0 …], off-diagonals doubled; and how many
    of them were saturated.

    Raises
    ------
    DtpError
        for other shapes.
    """
    params = LiftParams(config)
    plain = _plain_lanes(config, job, "queries", queries)
    sums = plain * job.query_scale
    if not job.lift:
        return round_shift(sums, params.query_shift), 0
    rank = config.max_frame_rank
    factor = pad_factors(config, np.zeros((0, 0, 0)) if factors is None else factors, job.tokens)
    vector = plain[:, :rank]
    metric = _metric(params, factor)
    sums[:, :rank] += job.metric_scale * _metric_vector(params, metric, vector)
    outer = round_shift(vector[:, :, np.newaxis] * vector[:, np.newaxis, :], params.metric_register_shift)
    twice = np.array([1 + (row != column) for row, column in params.pairs])
    lifted = np.concatenate(
        [
            (vector << params.vector_gain) * job.lift_vector_scale,
            _symmetric(params, metric) * twice * job.lift_metric_scale,
            _symmetric(params, outer) * twice * job.lift_outer_scale,
        ],
        axis=1,
    )
    lifted = np.pad(lifted, ((0, 0), (0, config.lifted_passes * config.block - lifted.shape[1])))
    parts = (
        (round_shift(sums, params.query_shift), config.row_bits),
        (round_shift(lifted, params.lifted_shift), config.lifted_row_bits),
    )
    rows = np.concatenate([saturate(part, bits) for part, bits in parts], axis=1)
    return rows, sum(int(overflows(part, bits).sum()) for part, bits in parts)


def lift_keys(
    config: Config, job: Job, keys: ArrayLike, factors: ArrayLike | None, bias: ArrayLike | None
) -> tuple[Int, Int, int]:
    """Lifted lanes and biases of a head's keys, for a job with ``bias``.

    Parameters
    ----------
    keys: (L, d) integers of ``operand_bits``
    factors: C, (L, R, r) integers of ``operand_bits``, for a lifting job
    bias: (L,) 16-bit integers, None for 0

    Returns
    -------
    lifted lanes (L, lifted_passes · block) of ``lifted_bits``: [Mb, bbᵀ, M, 0 …], all 0 for a job without lift;
    β (L,) of 24 bits; and how many of both were saturated.

    Raises
    ------
    DtpError
        for other shapes.
    """
    params = LiftParams(config)
    plain = _plain_lanes(config, job, "keys", keys)
    word = np.zeros(job.tokens, np.int64) if bias is None else np.asarray(bias, dtype=np.int64)
    norm = round_shift((plain * plain).sum(axis=1), params.norm_register_shift)
    beta = job.bias_scale * word + job.norm_scale * norm
    lanes = np.zeros((job.tokens, config.lifted_passes * config.block), dtype=np.int64)
    if job.lift:
        factor = pad_factors(config, np.zeros((0, 0, 0)) if factors is None else factors, job.tokens)
        vector = plain[:, : config.max_frame_rank]
        metric = _metric(params, factor)
        metric_vector = _metric_vector(params, metric, vector)
        outer = vector[:, :, np.newaxis] * vector[:, np.newaxis, :]
        inner = (vector * metric_vector).sum(axis=1)
        beta = beta + job.metric_norm_scale * round_shift(inner, params.vector_register_shift)
        filled = np.concatenate(
            [
                round_shift(metric_vector, job.key_vector_shift),
                round_shift(_symmetric(params, outer), job.key_outer_shift),
                round_shift(_symmetric(params, metric), job.key_metric_shift),
            ],
            axis=1,
        )
        lanes[:, : filled.shape[1]] = filled
    beta = round_shift(beta, job.bias_shift)
    saturations = overflows(lanes, config.lifted_bits).sum() + overflows(beta, BIAS_BITS).sum()
    return saturate(lanes, config.lifted_bits), saturate(beta, BIAS_BITS), int(saturations)
