#include "stream.cu"

// Products one after the other as dependent launches: op i with grid (blocks[i], rows[i]) and shared[i] bytes.
extern "C" const char* emulate(const Op* ops, int count, const int* blocks, const int* rows, const int* shared, unsigned seed) {
    for (int i = 0; i < count; i++) {
        const Op op = ops[i];
        const Place grid{(unsigned)blocks[i], (unsigned)rows[i], 1};
        emulator::kernels.push_back({grid, THREADS, (size_t)shared[i], [op] { stream_product(op); }});
    }
    return emulator::run(seed);
}
