// LUT4, PFUMX and L6MUX21 of the Lattice ECP5: a table of four inputs, and the two multiplexers behind it.
module LUT4 #(
    parameter [15:0] INIT = 0
) (
    input A, B, C, D,
    output Z
);
    assign Z = INIT[{D, C, B, A}];
endmodule

module PFUMX (
    input ALUT, BLUT, C0,
    output Z
);
    assign Z = C0 ? ALUT : BLUT;
endmodule

module L6MUX21 (
    input D0, D1, SD,
    output Z
);
    assign Z = SD ? D1 : D0;
endmodule
