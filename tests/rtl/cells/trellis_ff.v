// TRELLIS_FF of the Lattice ECP5 in the one configuration that rtl/lib/multiplier.py uses: no set, no reset, always
// enabled, 0 after configuration.
module TRELLIS_FF #(
    parameter GSR = "ENABLED",
    parameter CEMUX = "1",
    parameter CLKMUX = "CLK",
    parameter LSRMUX = "LSR",
    parameter SRMODE = "LSR_OVER_CE",
    parameter REGSET = "RESET"
) (
    input CLK, LSR, DI,
    output Q
);
    if (GSR != "DISABLED" || CEMUX != "1" || CLKMUX != "CLK" || LSRMUX != "LSR" || SRMODE != "LSR_OVER_CE" ||
        REGSET != "RESET")
        $error("TRELLIS_FF: this configuration is not modelled");

    reg q = 0;
    always @(posedge CLK) begin
        if (LSR) $fatal(1, "TRELLIS_FF: this use of the inputs is not modelled");
        q <= DI;
    end
    assign Q = q;
endmodule
