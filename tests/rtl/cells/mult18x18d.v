// MULT18X18D of the Lattice ECP5 in the one configuration that rtl/lib/multiplier.py uses: both operands and the
// product registered by CLK0, operand A enabled by CE0, the rest by CE1, no pipeline register, both operands signed.
module MULT18X18D #(
    parameter REG_INPUTA_CLK = "NONE",
    parameter REG_INPUTA_CE = "CE0",
    parameter REG_INPUTA_RST = "RST0",
    parameter REG_INPUTB_CLK = "NONE",
    parameter REG_INPUTB_CE = "CE0",
    parameter REG_INPUTB_RST = "RST0",
    parameter REG_INPUTC_CLK = "NONE",
    parameter REG_PIPELINE_CLK = "NONE",
    parameter REG_OUTPUT_CLK = "NONE",
    parameter REG_OUTPUT_CE = "CE0",
    parameter REG_OUTPUT_RST = "RST0",
    parameter GSR = "ENABLED",
    parameter SOURCEB_MODE = "B_SHIFT",
    parameter MULT_BYPASS = "DISABLED",
    parameter RESETMODE = "SYNC"
) (
    input A17, A16, A15, A14, A13, A12, A11, A10, A9, A8, A7, A6, A5, A4, A3, A2, A1, A0,
    input B17, B16, B15, B14, B13, B12, B11, B10, B9, B8, B7, B6, B5, B4, B3, B2, B1, B0,
    input C17, C16, C15, C14, C13, C12, C11, C10, C9, C8, C7, C6, C5, C4, C3, C2, C1, C0,
    input SIGNEDA, SIGNEDB, SOURCEA, SOURCEB, CLK0, CE0, CE1, RST0,
    output P35, P34, P33, P32, P31, P30, P29, P28, P27, P26, P25, P24, P23, P22, P21, P20, P19, P18,
    output P17, P16, P15, P14, P13, P12, P11, P10, P9, P8, P7, P6, P5, P4, P3, P2, P1, P0
);
    if (REG_INPUTA_CLK != "CLK0" || REG_INPUTA_CE != "CE0" || REG_INPUTA_RST != "RST0" ||
        REG_INPUTB_CLK != "CLK0" || REG_INPUTB_CE != "CE1" || REG_INPUTB_RST != "RST0" ||
        REG_OUTPUT_CLK != "CLK0" || REG_OUTPUT_CE != "CE1" || REG_OUTPUT_RST != "RST0" ||
        REG_INPUTC_CLK != "NONE" || REG_PIPELINE_CLK != "NONE" || GSR != "DISABLED" ||
        SOURCEB_MODE != "B_INPUT" || MULT_BYPASS != "DISABLED" || RESETMODE != "SYNC")
        $error("MULT18X18D: this configuration is not modelled");

    wire signed [17:0] a_in = {A17, A16, A15, A14, A13, A12, A11, A10, A9, A8, A7, A6, A5, A4, A3, A2, A1, A0};
    wire signed [17:0] b_in = {B17, B16, B15, B14, B13, B12, B11, B10, B9, B8, B7, B6, B5, B4, B3, B2, B1, B0};
    wire fixed_inputs = SIGNEDA && SIGNEDB && !SOURCEA && !SOURCEB &&
        {C17, C16, C15, C14, C13, C12, C11, C10, C9, C8, C7, C6, C5, C4, C3, C2, C1, C0} == 0;

    reg signed [17:0] a = 0;
    reg signed [17:0] b = 0;
    reg signed [35:0] p = 0;
    always @(posedge CLK0) begin
        if (!fixed_inputs) $fatal(1, "MULT18X18D: this use of the inputs is not modelled");
        if (RST0) a <= 0; else if (CE0) a <= a_in;
        if (RST0) b <= 0; else if (CE1) b <= b_in;
        if (RST0) p <= 0; else if (CE1) p <= a * b;
    end
    assign {P35, P34, P33, P32, P31, P30, P29, P28, P27, P26, P25, P24, P23, P22, P21, P20, P19, P18,
            P17, P16, P15, P14, P13, P12, P11, P10, P9, P8, P7, P6, P5, P4, P3, P2, P1, P0} = p;
endmodule
