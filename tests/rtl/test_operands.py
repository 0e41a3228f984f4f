"""Operand memories: what was written at the contract's address is what a step or a feed gets, some cycles later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.sim import Simulator

from dtp.config import BIAS_BITS
from dtp.job import address_bias, address_keys, address_lifted, address_query, address_values
from rtl.attention import array_params
from rtl.operands import OperandMemories
from tests.tile import CONFIGS


def packed(values: np.ndarray, bits: int) -> int:
    """Numbers side by side, the first one lowest."""
    return sum((int(value) & ((1 << bits) - 1)) << (place * bits) for place, value in enumerate(values.reshape(-1)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CONFIGS)
def test_words_reach_the_array(name: str, seed: int) -> None:
    c = CONFIGS[name]
    dut = OperandMemories(c, array_params(c))
    rng = np.random.default_rng(seed)
    seen = {"keys": 0, "values": 0, "lifted": 0, "query": 0, "probabilities": 0, "bias": 0}

    def signed(bits: int, *shape: int) -> np.ndarray:
        return rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), shape)

    async def write(ctx: Any, port: Any, address: int, data: int, enables: int = 1) -> None:
        ctx.set(port.en, enables)
        ctx.set(port.addr, address)
        ctx.set(port.data, data)
        await ctx.tick()
        ctx.set(port.en, 0)

    async def bench(ctx: Any) -> None:
        keys: dict[tuple[int, ...], np.ndarray] = {}
        values: dict[tuple[int, ...], np.ndarray] = {}
        lifted: dict[tuple[int, ...], np.ndarray] = {}
        biases: dict[tuple[int, ...], np.ndarray] = {}
        queries: dict[tuple[int, ...], np.ndarray] = {}
        for _ in range(30):
            slot, block, step = int(rng.integers(2)), int(rng.integers(c.max_blocks)), int(rng.integers(c.pass_steps))
            chunk, number = int(rng.integers(c.max_chunks)), int(rng.integers(c.lifted_passes))
            key = block * c.block + step * c.segments
            word = keys[slot, chunk, block, step] = signed(c.operand_bits, c.segments, c.block)
            await write(ctx, dut.moving_write, address_keys(c, slot, chunk, key), packed(word, c.operand_bits))
            column = int(rng.integers(c.max_chunks * c.pass_steps))
            word = values[slot, block, column] = signed(c.operand_bits, c.segments, c.block)
            await write(ctx, dut.moving_write, address_values(c, slot, block, column), packed(word, c.operand_bits))
            word = biases[slot, block, step] = signed(BIAS_BITS, c.segments)
            await write(ctx, dut.bias_write, address_bias(c, slot, key), packed(word, BIAS_BITS))
            # Lifted lanes come one by one: each write leaves the others alone.
            word = lifted[slot, number, block, step] = signed(c.lifted_bits, c.segments, c.block)
            for lane in rng.permutation(c.block).tolist():
                only = signed(c.lifted_bits, c.segments, c.block)
                only[:, lane] = word[:, lane]
                address = address_lifted(c, slot, number, key)
                await write(ctx, dut.lifted_write, address, packed(only, c.lifted_bits), 1 << lane)
            chunk, group = int(rng.integers(c.max_chunks + c.lifted_passes)), int(rng.integers(c.query_groups))
            feed = int(rng.integers(c.pass_steps))
            word = queries[chunk, group, feed] = signed(c.row_bits, c.rows, c.segments)
            await write(ctx, dut.query_write, address_query(c, chunk, group, feed), packed(word, c.row_bits))

        stepped: list[Any] = [None] * c.operand_read_cycles
        fed: list[Any] = [None] * c.operand_read_cycles
        for _ in range(300):
            step, feed = dut.step, dut.feed
            kind = ("keys", "values", "lifted", None)[int(rng.integers(4))]
            ctx.set(step.valid, kind is not None)
            # The softmax answers a feed and the slot of a step in its own time: the cycle in which it is used.
            probabilities = rng.integers(0, 1 << c.probability_bits, (c.rows, c.segments))
            ctx.set(dut.probabilities.as_value(), packed(probabilities, c.probability_bits))
            rescale = rng.integers(0, 32, c.rows)
            ctx.set(dut.rescale.as_value(), packed(rescale, 5))
            for name in ("swap", "first", "emit", "has_bias"):
                ctx.set(step[name], int(rng.integers(2)))
            shift, address = int(rng.integers(4)), int(rng.integers(c.accumulator_depth))
            buffer, output = int(rng.integers(c.lookahead + 1)), int(rng.integers(c.output_slots))
            ctx.set(step.shift, 0 if kind == "values" else shift)
            ctx.set(step.address, address)
            ctx.set(step.buffer, buffer)
            ctx.set(step.output_slot, output)
            ctx.set(step.is_values, kind == "values")
            ctx.set(step.is_lifted, kind == "lifted")
            wanted: dict[str, Any] | None = None
            if kind is not None:
                source = {"keys": keys, "values": values, "lifted": lifted}[kind]
                place = list(source)[int(rng.integers(len(source)))]
                data, bias = source[place], np.zeros(c.segments, dtype=np.int64)
                ctx.set(step.slot, place[0])
                number = int(rng.integers(c.pass_steps))
                if kind == "values":
                    ctx.set(step.block, place[1])
                    ctx.set(step.step_number, place[2])
                    number = place[2]
                    ctx.set(step.has_bias, 0)
                else:
                    ctx.set(step.key_number, place[2] * c.pass_steps + place[3])
                    ctx.set(step.block, place[2])
                    ctx.set(step.step_number, place[3])
                    number = place[3]
                    ctx.set(step.pass_number, place[1] if kind == "keys" else 0)
                    ctx.set(step.lifted_number, place[1] if kind == "lifted" else 0)
                    known = biases.get((place[0], place[2], place[3]))
                    if known is None:
                        ctx.set(step.has_bias, 0)
                    elif ctx.get(step.has_bias):
                        bias = known
                        seen["bias"] += 1
                more = {"keys": c.sum_shift, "lifted": c.lifted_sum_shift, "values": -shift}[kind]
                seen[kind] += 1
                wanted = {
                    "data": packed(data, array_params(c).moving_bits),
                    "init": packed(bias, BIAS_BITS),
                    "shift": shift + more,
                    "addr": address,
                    "tag": (kind == "values", output if kind == "values" else buffer, number),
                    **{name: ctx.get(step[name]) for name in ("swap", "first", "emit")},
                }
            ready = stepped.pop(0)
            assert ctx.get(dut.step_valid) == (ready is not None)
            if ready is not None:
                out = dut.array_step
                assert ctx.get(out.data.as_value()) == ready["data"]
                assert ctx.get(out.init.as_value()) == ready["init"]
                for name in ("shift", "addr", "swap", "first", "emit"):
                    assert ctx.get(out[name]) == ready[name], name
                assert ctx.get(dut.array_rescale.as_value()) == ready["rescale"]
                assert ready["tag"] == tags(ctx.get(out.tag))
            # The slot of a step is asked for a cycle before its rescale is used.
            if stepped and stepped[0] is not None:
                is_values, _, _ = stepped[0]["tag"]
                stepped[0]["rescale"] = packed(rescale, 5) if is_values else 0
                assert ctx.get(dut.rescale_slot) == stepped[0]["buffer"]
            if wanted is not None:
                wanted["buffer"] = buffer
            stepped.append(wanted)

            feeds = ("query", "probabilities", None)[int(rng.integers(3))]
            ctx.set(feed.valid, feeds is not None)
            ctx.set(feed.is_values, feeds == "probabilities")
            chunk, group, number = list(queries)[int(rng.integers(len(queries)))]
            ctx.set(feed.query_address, address_query(c, chunk, group, number))
            asked = int(rng.integers(c.lookahead + 1)), int(rng.integers(c.pass_steps))
            ctx.set(feed.buffer, asked[0])
            ctx.set(feed.number, asked[1])
            given = fed.pop(0)
            assert ctx.get(dut.feed_valid) == (given is not None)
            if given is not None:
                word = packed(probabilities if isinstance(given, tuple) else given, c.row_bits)
                assert ctx.get(dut.feed_data.as_value()) == word
            if feeds is not None:
                seen[feeds] += 1
            fed.append({"query": queries[chunk, group, number], "probabilities": asked, None: None}[feeds])
            # The softmax is asked two cycles before its answer is used.
            if isinstance(fed[1], tuple):
                assert (ctx.get(dut.p_slot), ctx.get(dut.p_feed)) == fed[1]
            await ctx.tick()

    def tags(value: int) -> tuple[int, int, int]:
        slot_bits = max((c.lookahead).bit_length(), (c.output_slots - 1).bit_length())
        return value & 1, value >> 1 & ((1 << slot_bits) - 1), value >> 1 + slot_bits

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert min(seen.values()) >= 20, seen
