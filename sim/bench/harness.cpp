// Clocks the same Verilated feeder as the cocotb backend, with nothing around it: the rate to compare with.
// The time of construction and of the initial settling is not counted.
#include <chrono>
#include <cstdio>
#include <memory>

#include "Vtop.h"
#include "verilated.h"

int main(int argc, char** argv) {
    auto context = std::make_unique<VerilatedContext>();
    context->commandArgs(argc, argv);
    auto top = std::make_unique<Vtop>(context.get(), "");
    top->tick = 0;
    top->eval();
    const auto start = std::chrono::steady_clock::now();
    while (!top->finished && !context->gotFinish()) {
        top->tick = 1;
        context->timeInc(5000);
        top->eval();
        top->tick = 0;
        context->timeInc(5000);
        top->eval();
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const bool good = top->finished;
    top->final();
    std::printf("wall_s %.9f\n", seconds.count());
    return good ? 0 : 1;
}
