"""Payloads that the units of the tile hand to each other."""

from __future__ import annotations

from amaranth.hdl import unsigned
from amaranth.lib import data

from dtp.array import ArrayParams
from dtp.config import SHIFT_FIELD_BITS, Config
from dtp.normaliser import RecordKind

__all__ = [
    "FeedLayout",
    "ItemLayout",
    "JobLayout",
    "PassLayout",
    "RecordKind",
    "RecordLayout",
    "RowLayout",
    "ScoreLayout",
    "StepControlLayout",
    "StepTag",
]


def _below(count: int) -> int:
    """Bits of a number from 0 to count − 1."""
    return max(1, (count - 1).bit_length())


class JobLayout(data.StructLayout):
    """What the walker needs of a job's descriptor; ``error`` is 0 for a job that runs, ``gated`` only with a gate."""

    def __init__(self, config: Config, *, gated: bool = False) -> None:
        c = config
        super().__init__(
            {
                "tokens": unsigned(_below(c.max_tokens + 1)),
                "valid_length": unsigned(_below(c.max_tokens + 1)),
                "chunks": unsigned(_below(c.max_chunks + 1)),
                "blocks": unsigned(_below(c.max_blocks + 1)),
                "groups": unsigned(_below(c.max_groups + 1)),
                "lift": unsigned(1),
                "bias": unsigned(1),
                "causal": unsigned(1),
                "score_shift": unsigned(SHIFT_FIELD_BITS),
                "lift_shift": unsigned(SHIFT_FIELD_BITS),
                "tag": unsigned(16),
                "error": unsigned(8),
            }
            | ({"gated": unsigned(1)} if gated else {})
        )


class RowLayout(data.StructLayout):
    """A row of the gate's mask; whether its head is skipped; whether it is the head's last."""

    def __init__(self, blocks: int) -> None:
        super().__init__({"mask": unsigned(blocks), "skipped": unsigned(1), "last": unsigned(1)})


class ItemLayout(data.StructLayout):
    """One kept (group, block), an empty group (``is_null``) or the end of a job (``is_end``)."""

    def __init__(self, config: Config) -> None:
        c = config
        super().__init__(
            {
                "slot": unsigned(1),
                "block": unsigned(_below(c.max_blocks)),
                "chunks": unsigned(_below(c.max_chunks + 1)),
                "live_count": unsigned(_below(c.rows + 1)),
                "first": unsigned(1),
                "last": unsigned(1),
                "is_null": unsigned(1),
                "is_end": unsigned(1),
            }
        )


class ScoreLayout(data.StructLayout):
    """What only the scores of an item need: of its group, and of its job."""

    def __init__(self, config: Config) -> None:
        c = config
        tokens = unsigned(_below(c.max_tokens + 1))
        super().__init__(
            {
                "group": unsigned(_below(2 * c.query_groups)),
                "query_base": tokens,
                "valid_length": tokens,
                "lift": unsigned(1),
                "bias": unsigned(1),
                "causal": unsigned(1),
                "score_shift": unsigned(SHIFT_FIELD_BITS),
                "lift_shift": unsigned(SHIFT_FIELD_BITS),
            }
        )


class PassLayout(data.StructLayout):
    """One pass of the array: a stationary operand and the steps that use it.

    ``number`` counts plain passes, then lifted ones; ``score`` means nothing for a pass of values.
    """

    def __init__(self, config: Config) -> None:
        c = config
        super().__init__(
            {
                "slot": unsigned(1),
                "is_values": unsigned(1),
                "is_lifted": unsigned(1),
                "is_first": unsigned(1),
                "is_last": unsigned(1),
                "first_of_group": unsigned(1),
                "last_of_group": unsigned(1),
                "number": unsigned(_below(c.max_chunks)),
                "lifted_number": unsigned(_below(c.lifted_passes)),
                "block": unsigned(_below(c.max_blocks)),
                "chunks": unsigned(_below(c.max_chunks + 1)),
                "buffer": unsigned(_below(c.lookahead + 1)),
                "output_slot": unsigned(_below(c.output_slots)),
                "score": ScoreLayout(c),
            }
        )


class FeedLayout(data.StructLayout):
    """Read address of one feed: of the query ring, or of the probabilities of an item."""

    def __init__(self, config: Config) -> None:
        c = config
        depth = (c.max_chunks + c.lifted_passes) * c.query_groups * c.pass_steps
        super().__init__(
            {
                "valid": unsigned(1),
                "is_values": unsigned(1),
                "number": unsigned(_below(c.pass_steps)),
                "buffer": unsigned(_below(c.lookahead + 1)),
                "query_address": unsigned(_below(depth)),
            }
        )


class StepControlLayout(data.StructLayout):
    """One step of the array before its moving operand is read."""

    def __init__(self, config: Config, array: ArrayParams) -> None:
        c = config
        super().__init__(
            {
                "valid": unsigned(1),
                "swap": unsigned(1),
                "is_values": unsigned(1),
                "is_lifted": unsigned(1),
                "slot": unsigned(1),
                "key_number": unsigned(_below(c.max_tokens // c.segments)),
                "step_number": unsigned(_below(c.max_chunks * c.pass_steps)),
                "pass_number": unsigned(_below(c.max_chunks)),
                "lifted_number": unsigned(_below(c.lifted_passes)),
                "block": unsigned(_below(c.max_blocks)),
                "address": unsigned(array.addr_bits),
                "first": unsigned(1),
                "has_bias": unsigned(1),
                "shift": unsigned(SHIFT_FIELD_BITS),
                "emit": unsigned(1),
                "buffer": unsigned(_below(c.lookahead + 1)),
                "output_slot": unsigned(_below(c.output_slots)),
            }
        )


class StepTag(data.StructLayout):
    """What travels through the array with a step and names its result."""

    def __init__(self, config: Config) -> None:
        c = config
        super().__init__(
            {
                "is_values": unsigned(1),
                "slot": unsigned(max(_below(c.lookahead + 1), _below(c.output_slots))),
                "number": unsigned(_below(c.max_chunks * c.pass_steps)),
            }
        )


class RecordLayout(data.StructLayout):
    """One group with outputs, one empty group, or the status record that ends a job."""

    def __init__(self, config: Config) -> None:
        c = config
        super().__init__(
            {
                "kind": RecordKind,
                "slot": unsigned(_below(c.output_slots)),
                "steps": unsigned(_below(c.max_chunks * c.pass_steps + 1)),
                "live_rows": unsigned(c.rows),
                "tag": unsigned(16),
                "error": unsigned(8),
                "lift_saturations": unsigned(16),
            }
        )
