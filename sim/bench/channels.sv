// Parts of the feeder for a design with several streams; `sim.bench.channels` writes `dtp_feeder`, which joins them.
//
// Cycle 0 is the first one after the initial reset; the clock edge at its end is the first that counts. Everything
// driven into `top` is a register here, so that no combinational path runs through the bench.
//
// Plusargs: +folder (of all files), +timeout (cycles in all), +drain (cycles watched after the last word).

// Reset, number of the cycle, and the end: `counting` is 1 in a cycle that counts, `following` before one, `ending` in
// the last one, `closing` in the one after it.
module dtp_control (
    input  logic clk,
    input  logic complete,
    output logic rst,
    output logic counting,
    output logic following,
    output logic ending,
    output logic closing,
    output longint cycle,
    output logic finished,
    output logic timed_out
);
    string folder;
    longint timeout, drain, idle;
    int boot, status_file;
    logic drained;

    assign counting = boot == 0 && !closing && !finished;
    assign drained = complete && idle >= drain;
    assign ending = counting && (drained || cycle + 1 >= timeout);
    assign following = boot <= 1 && !ending && !closing && !finished;

    initial begin
        if ($value$plusargs("folder=%s", folder) == 0 || $value$plusargs("timeout=%d", timeout) == 0
            || $value$plusargs("drain=%d", drain) == 0) begin
            $display("dtp_feeder: plusarg +folder, +timeout or +drain is missing");
            $fatal;
        end
        boot = 4;
        cycle = 0;
        idle = 0;
        rst = 1;
        closing = 0;
        finished = 0;
        timed_out = 0;
    end

    always @(posedge clk) begin
        if (boot > 0) boot <= boot - 1;
        rst <= boot > 1;
        if (counting) begin
            if (following) cycle <= cycle + 1;
            if (complete) idle <= idle + 1;
        end
        closing <= ending;
        if (ending) timed_out <= !drained;
        if (closing) begin
            status_file = $fopen({folder, "/control.txt"}, "w");
            $fdisplay(status_file, "cycles %0d", cycle + 1);
            $fdisplay(status_file, "timed_out %0d", timed_out);
            $fclose(status_file);
            finished <= 1;
        end
    end
endmodule

// Offers the records of NAME.in, 8 bytes first cycle, then the payload from its most significant byte down. NAME.cfg
// holds their number, the stall in 65536ths and the state of its generator; NAME.taken gets the cycle of each.
module dtp_source #(
    parameter string NAME = "",
    parameter int BITS = 1
) (
    input  logic clk,
    input  logic counting,
    input  logic following,
    input  logic closing,
    input  longint cycle,
    output logic done,
    input  logic ready,
    output logic valid,
    output logic [BITS-1:0] data
);
    import dtp_bench::xorshift;

    localparam int BYTES = (BITS + 7) / 8;
    localparam int FILL_WORDS = (BITS + 31) / 32;

    string folder;
    int config_file, input_file, taken_file, got;
    longint count, next_record, accepted, next_cycle, held_from;
    int unsigned stall, state;
    logic held, offered, taken;
    logic [63:0] record_from;
    logic [8*BYTES-1:0] record_data, held_data;
    logic [32*FILL_WORDS-1:0] fill;

    assign taken = counting && valid && ready;
    assign done = accepted + (taken ? 64'd1 : 64'd0) >= count;

    initial begin
        got = $value$plusargs("folder=%s", folder);
        config_file = $fopen({folder, "/", NAME, ".cfg"}, "r");
        input_file = $fopen({folder, "/", NAME, ".in"}, "rb");
        taken_file = $fopen({folder, "/", NAME, ".taken"}, "wb");
        if (config_file == 0 || input_file == 0 || taken_file == 0
            || $fscanf(config_file, "%d %d %d", count, stall, state) != 3) begin
            $display("dtp_feeder: cannot use the files of %s", NAME);
            $fatal;
        end
        $fclose(config_file);
        next_record = 0;
        accepted = 0;
        held = 0;
        offered = 0;
        valid = 0;
        data = '0;
    end

    always @(posedge clk) begin
        if (taken) begin
            accepted <= accepted + 1;
            $fwrite(taken_file, "%u", cycle);
            held = 0;
        end
        if (following) begin
            next_cycle = counting ? cycle + 1 : 0;
            if (counting) state = xorshift(state);
            if (!held && next_record < count) begin
                got = $fread(record_from, input_file);
                got = got + $fread(record_data, input_file);
                if (got != 8 + BYTES) begin
                    $display("dtp_feeder: record %0d of %s is missing", next_record, NAME);
                    $fatal;
                end
                held_from = record_from;
                held_data = record_data;
                next_record = next_record + 1;
                held = 1;
                offered = 0;
            end
            if (held && (offered || (next_cycle >= held_from && state[15:0] >= stall[15:0]))) begin
                offered = 1;
                valid <= 1;
                data <= held_data[BITS-1:0];
            end else begin
                // Garbage, which a design that forgets to look at `valid` will take in.
                fill = {FILL_WORDS{state}};
                valid <= 0;
                data <= fill[BITS-1:0];
            end
        end else valid <= 0;
        if (closing) begin
            $fclose(taken_file);
            $fclose(input_file);
        end
    end
endmodule

// Takes words and writes them to NAME.out, 32-bit words, least significant first: cycle (2), payload. NAME.cfg holds
// how many are expected, the stall in 65536ths and the state of its generator; NAME.txt gets what went wrong.
module dtp_sink #(
    parameter string NAME = "",
    parameter int BITS = 1
) (
    input  logic clk,
    input  logic counting,
    input  logic following,
    input  logic ending,
    input  logic closing,
    input  longint cycle,
    output logic done,
    output logic violated,
    output logic extra,
    output logic ready,
    input  logic valid,
    input  logic [BITS-1:0] data
);
    import dtp_bench::xorshift;

    localparam int WORDS = (BITS + 31) / 32;

    string folder;
    int config_file, output_file, status_file, got;
    longint expected, seen, extra_seen, first_violation;
    int unsigned stall, state;
    logic taken, waiting;
    logic [BITS-1:0] offer;
    logic [32*WORDS-1:0] word;

    assign taken = counting && valid && ready;
    assign done = seen + (taken ? 64'd1 : 64'd0) >= expected;

    initial begin
        got = $value$plusargs("folder=%s", folder);
        config_file = $fopen({folder, "/", NAME, ".cfg"}, "r");
        output_file = $fopen({folder, "/", NAME, ".out"}, "wb");
        if (config_file == 0 || output_file == 0
            || $fscanf(config_file, "%d %d %d", expected, stall, state) != 3) begin
            $display("dtp_feeder: cannot use the files of %s", NAME);
            $fatal;
        end
        $fclose(config_file);
        seen = 0;
        extra_seen = 0;
        first_violation = -1;
        violated = 0;
        extra = 0;
        waiting = 0;
        ready = 0;
    end

    always @(posedge clk) begin
        if (counting) begin
            if (waiting && (!valid || data != offer) && first_violation < 0) begin
                first_violation <= cycle;
                violated <= 1;
            end
            waiting <= valid && !ready;
            offer <= data;
            if (taken) begin
                seen <= seen + 1;
                word = '0;
                word[BITS-1:0] = data;
                $fwrite(output_file, "%u%u", cycle, word);
            end
            // A word that is offered but not taken at the end is one too many as well.
            if (seen >= expected && (taken || (ending && valid))) begin
                extra_seen <= extra_seen + 1;
                extra <= 1;
            end
        end
        if (following) begin
            if (counting) state = xorshift(state);
            ready <= state[15:0] >= stall[15:0];
        end else ready <= 0;
        if (closing) begin
            status_file = $fopen({folder, "/", NAME, ".txt"}, "w");
            $fdisplay(status_file, "words %0d", seen);
            $fdisplay(status_file, "extra %0d", extra_seen);
            $fdisplay(status_file, "violation %0d", first_violation);
            $fclose(status_file);
            $fclose(output_file);
        end
    end
endmodule
