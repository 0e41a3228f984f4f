// Feeds a stream from a file to the processor, captures what comes back, and raises `finished`.
//
// Cycle 0 is the first one after the initial reset; the clock edge at its end is the first that counts. Everything
// driven into `top` is a register here, so that no combinational path runs through the bench.
//
// Plusargs: +input +output +status (file names), +beats (input beats in the file), +packets (tlast expected),
// +timeout (cycles in all), +drain (cycles watched after the last packet), +source_stall +sink_stall (0..65535 of
// 65536), +source_seed +sink_seed (32-bit, not 0), +abort_at +reset_at (cycle, -1 = never), +restart (beat with
// which the input goes on after the reset).
//
// Input record: one byte tlast, then tdata from its most significant byte down.
// Output record, 32-bit words, least significant first: cycle (2), {tuser, tlast}, tdata.
module dtp_feeder #(
    parameter int IN_BYTES = 1,
    parameter int OUT_BYTES = 1,
    parameter int USER_BITS = 1,
    parameter bit BURST = 0
) (
    input  logic tick,
    output logic finished,
    output logic timed_out,
    output logic violated,
    output logic extra
);
    import dtp_bench::xorshift;

    localparam int IN_BITS = 8 * IN_BYTES;
    localparam int OUT_BITS = 8 * OUT_BYTES;
    localparam int TAG_WORDS = (USER_BITS + 1 + 31) / 32;
    localparam int DATA_WORDS = (OUT_BITS + 31) / 32;
    localparam int FILL_WORDS = (IN_BITS + 31) / 32;

    logic clk;
    dtp_clock #(.BURST(BURST)) clock (.tick(tick), .clk(clk));

    logic rst, abort;
    logic [IN_BITS-1:0] s_data;
    logic s_valid, s_ready, s_last;
    logic [OUT_BITS-1:0] m_data;
    logic [USER_BITS-1:0] m_user;
    logic m_valid, m_ready, m_last;

    top dut (
        .clk(clk), .rst(rst), .abort(abort),
        .s_axis_tdata(s_data), .s_axis_tvalid(s_valid), .s_axis_tready(s_ready), .s_axis_tlast(s_last),
        .m_axis_tdata(m_data), .m_axis_tvalid(m_valid), .m_axis_tready(m_ready), .m_axis_tlast(m_last),
        .m_axis_tuser(m_user)
    );

    string input_name, output_name, status_name;
    int input_file, output_file, status_file;
    longint beats, packets, timeout, drain, abort_at, reset_at, restart;
    int unsigned source_stall, sink_stall, source_state, sink_state;

    int boot;                      // cycles of the initial reset still to come
    longint cycle;                 // number of the cycle that the next edge ends
    longint next_beat;             // index of the next beat to read from the file
    longint taken;                 // input beats accepted
    longint packets_seen, beats_seen, extra_seen, idle;
    longint first_input, first_violation;
    logic held, offered, waiting;
    logic [7:0] held_last;
    logic [IN_BITS-1:0] held_data;
    logic [OUT_BITS+USER_BITS:0] offer;
    logic [8*(IN_BYTES+1)-1:0] record_in;
    logic [32*TAG_WORDS-1:0] tag;
    logic [32*DATA_WORDS-1:0] word;
    logic [32*FILL_WORDS-1:0] fill;
    int got;

    task automatic need(input int found, input string name);
        if (found == 0) begin
            $display("dtp_feeder: plusarg +%s is missing", name);
            $fatal;
        end
    endtask

    initial begin
        need($value$plusargs("input=%s", input_name), "input");
        need($value$plusargs("output=%s", output_name), "output");
        need($value$plusargs("status=%s", status_name), "status");
        need($value$plusargs("beats=%d", beats), "beats");
        need($value$plusargs("packets=%d", packets), "packets");
        need($value$plusargs("timeout=%d", timeout), "timeout");
        need($value$plusargs("drain=%d", drain), "drain");
        need($value$plusargs("source_stall=%d", source_stall), "source_stall");
        need($value$plusargs("sink_stall=%d", sink_stall), "sink_stall");
        need($value$plusargs("source_seed=%d", source_state), "source_seed");
        need($value$plusargs("sink_seed=%d", sink_state), "sink_seed");
        need($value$plusargs("abort_at=%d", abort_at), "abort_at");
        need($value$plusargs("reset_at=%d", reset_at), "reset_at");
        need($value$plusargs("restart=%d", restart), "restart");
        input_file = $fopen(input_name, "rb");
        output_file = $fopen(output_name, "wb");
        if (input_file == 0 || output_file == 0) begin
            $display("dtp_feeder: cannot open %s or %s", input_name, output_name);
            $fatal;
        end
        boot = 4;
        cycle = -1;
        next_beat = 0;
        taken = 0;
        packets_seen = 0;
        beats_seen = 0;
        extra_seen = 0;
        idle = 0;
        first_input = -1;
        first_violation = -1;
        held = 0;
        offered = 0;
        waiting = 0;
        rst = 1;
        abort = 0;
        s_valid = 0;
        s_data = '0;
        s_last = 0;
        m_ready = 0;
        finished = 0;
        timed_out = 0;
        violated = 0;
        extra = 0;
    end

    always @(posedge clk) if (!finished) begin
        // What happened in the cycle that ends here.
        if (boot == 0) begin
            if (!rst) begin
                if (waiting && (!m_valid || offer != {m_data, m_user, m_last}) && first_violation < 0) begin
                    first_violation = cycle;
                    violated <= 1;
                end
                waiting = m_valid && !m_ready;
                offer = {m_data, m_user, m_last};
                if (s_valid && s_ready) begin
                    if (first_input < 0) first_input = cycle;
                    taken = taken + 1;
                    held = 0;
                end
                if (m_valid && m_ready) begin
                    if (packets_seen >= packets) begin
                        extra_seen = extra_seen + 1;
                        extra <= 1;
                    end else if (m_last) packets_seen = packets_seen + 1;
                    beats_seen = beats_seen + 1;
                    tag = '0;
                    tag[USER_BITS:0] = {m_user, m_last};
                    word = '0;
                    word[OUT_BITS-1:0] = m_data;
                    $fwrite(output_file, "%u%u%u", cycle, tag, word);
                end
                if (packets_seen >= packets && next_beat == beats && !held) idle = idle + 1;
            end else begin
                held = 0;
                waiting = 0;
                packets_seen = 0;
                idle = 0;
                next_beat = restart;
                got = $fseek(input_file, int'(restart * (IN_BYTES + 1)), 0);
            end
        end

        if (boot == 0 && (idle > drain || cycle + 1 >= timeout)) begin
            if (idle > drain) begin
                // A beat that is offered but not taken is one too many as well.
                if (waiting) begin
                    extra_seen = extra_seen + 1;
                    extra <= 1;
                end
            end else timed_out <= 1;
            status_file = $fopen(status_name, "w");
            $fdisplay(status_file, "cycles %0d", cycle + 1);
            $fdisplay(status_file, "first_input %0d", first_input);
            $fdisplay(status_file, "taken %0d", taken);
            $fdisplay(status_file, "unread %0d", beats - next_beat + (held ? 64'd1 : 64'd0));
            $fdisplay(status_file, "beats %0d", beats_seen);
            $fdisplay(status_file, "packets %0d", packets_seen);
            $fdisplay(status_file, "extra %0d", extra_seen);
            $fdisplay(status_file, "violation %0d", first_violation);
            $fdisplay(status_file, "timed_out %0d", idle > drain ? 0 : 1);
            $fclose(status_file);
            $fclose(output_file);
            $fclose(input_file);
            s_valid <= 0;
            m_ready <= 0;
            finished <= 1;
        end else if (boot > 1) begin
            boot = boot - 1;
        end else begin
            // What the next cycle will see.
            boot = 0;
            cycle = cycle + 1;
            if (cycle > 0) begin
                source_state = xorshift(source_state);
                sink_state = xorshift(sink_state);
            end
            rst <= cycle == reset_at;
            abort <= cycle == abort_at;
            if (cycle != reset_at && !held && next_beat < beats) begin
                got = $fread(record_in, input_file);
                if (got != IN_BYTES + 1) begin
                    $display("dtp_feeder: beat %0d of the input is missing", next_beat);
                    $fatal;
                end
                {held_last, held_data} = record_in;
                next_beat = next_beat + 1;
                held = 1;
                offered = 0;
            end
            if (cycle != reset_at && held && (offered || source_state[15:0] >= source_stall[15:0])) begin
                offered = 1;
                s_valid <= 1;
                s_data <= held_data;
                s_last <= held_last[0];
            end else begin
                // Garbage, which a design that forgets to look at `valid` will take in.
                fill = {FILL_WORDS{source_state}};
                s_valid <= 0;
                s_data <= fill[IN_BITS-1:0];
                s_last <= source_state[0];
            end
            m_ready <= cycle != reset_at && sink_state[15:0] >= sink_stall[15:0];
        end
    end
endmodule
