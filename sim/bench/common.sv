// What the feeders share: the clock, and the generator behind their stall patterns.
package dtp_bench;
    function automatic int unsigned xorshift(input int unsigned x);
        int unsigned y;
        y = x ^ (x << 13);
        y = y ^ (y >> 17);
        return y ^ (y << 5);
    endfunction
endpackage

// Plain: `tick` is the clock. Burst: each change of `tick` makes 16 clock cycles without a step of simulated time,
// because a step costs the simulator's interface to Python as much as a cycle of a mid-size design.
module dtp_clock #(
    parameter bit BURST = 0
) (
    input  logic tick,
    output logic clk
);
    if (BURST) begin : burst
        logic [5:0] edges;
        initial edges = 0;
        always @(posedge tick or negedge tick or posedge clk or negedge clk)
            if (edges[4:0] != 0 || edges[5] != tick) edges <= edges + 1;
        assign clk = edges[0];
    end else begin : plain
        assign clk = tick;
    end
endmodule
