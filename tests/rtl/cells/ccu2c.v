// CCU2C of the Lattice ECP5, two positions of a carry chain, without injection: each position has a table of four inputs
// whose value is the half sum; where it is 0 the low four entries, read by A and B, give the carry.
module CCU2C #(
    parameter [15:0] INIT0 = 0,
    parameter [15:0] INIT1 = 0,
    parameter INJECT1_0 = "YES",
    parameter INJECT1_1 = "YES"
) (
    input CIN, A0, B0, C0, D0, A1, B1, C1, D1,
    output S0, S1, COUT
);
    if (INJECT1_0 != "NO" || INJECT1_1 != "NO")
        $error("CCU2C: injection is not modelled");

    wire half_0 = INIT0[{D0, C0, B0, A0}];
    wire half_1 = INIT1[{D1, C1, B1, A1}];
    wire carry_0 = half_0 ? CIN : INIT0[{2'b00, B0, A0}];
    assign S0 = half_0 ^ CIN;
    assign S1 = half_1 ^ carry_0;
    assign COUT = half_1 ? carry_0 : INIT1[{2'b00, B1, A1}];
endmodule
