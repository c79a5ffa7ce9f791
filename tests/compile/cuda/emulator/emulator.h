// Blocks of a GPU as fibers of one host thread, to run compile/cuda/stream.cu on a CPU.
//
// Warps and lanes run in random orders, and may be held up, wherever they meet: shuffles, products, barriers, waits.
// Copies into shared memory arrive as late as they may, at random, and from the moment they are asked for the memory
// holds rubbish: whoever reads too early or overwrites too early computes something else. Kernels of a chain begin when
// all blocks of their predecessor have let them go, and find the end of it where they wait. Ends with a message if
// something hangs, reads beyond shared memory, is misaligned, or leaves copies behind.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

typedef uint32_t u32;
typedef unsigned long long u64;
typedef uint16_t u16;
#define DEV static inline
#define DEV_MEMBER inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED(name) char* name = emulator::block().shared
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct Place { unsigned x, y, z; };

namespace emulator {
struct Copy { void* dst; const void* src; u64* bar; int due, size; unsigned lane, group; };  // bar: bulk copies
struct Warp { int arrived = 0; unsigned generation = 0; u64 slots[2][32][6]; };
struct Block {
    std::vector<char> room;
    char* shared;
    std::vector<Warp> warps;
    std::vector<Copy> copies;
    int arrived = 0, threads = 0, live = 0, kernel = 0;
    unsigned generation = 0;
    Place at;
    bool let_go = false;
};
struct Fiber { ucontext_t context; std::vector<char> stack; Block* block; unsigned tid, meetings = 0, groups = 0; bool done = false; };
struct Kernel { Place grid; unsigned threads; size_t shared; std::function<void()> body; bool begun = false, ended = false; };

inline std::vector<Kernel> kernels;
inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* now;
inline ucontext_t host;
inline std::mt19937 chance;

inline Block& block() { return *now->block; }
inline void yield() { swapcontext(&now->context, &host); }
inline const char* failure;
inline void fail(const char* what) { failure = what, yield(); }  // of a fiber: which is never run again
inline void arrive(const Copy& c) { memcpy(c.dst, c.src, c.size); if (c.bar) ++*c.bar; }
inline void deliver(Block& b, const std::function<bool(Copy&)>& is_due) {
    for (size_t i = 0; i < b.copies.size();)
        if (is_due(b.copies[i])) arrive(b.copies[i]), b.copies.erase(b.copies.begin() + i); else i++;
}
inline void begin_copy(void* dst, const void* src, u64* bar, int size) {
    if ((uintptr_t)dst % 16 || (uintptr_t)src % 16) fail("misaligned copy");
    memset(dst, 0xEE, size);
    block().copies.push_back({dst, src, bar, 1 + (int)(chance() % 40), size, now->tid, now->groups});
}
inline void meet(int& arrived, unsigned& generation, int all) {
    const unsigned mine = generation;
    if (++arrived == all) arrived = 0, generation++;
    else while (generation == mine) yield();
    if (chance() % 8 == 0) yield();
}
inline Warp& warp() { return block().warps[now->tid / 32]; }
inline u64 (*exchange(const u64* mine, int n))[6] {
    auto slots = warp().slots[now->meetings++ & 1];
    memcpy(slots[now->tid % 32], mine, n * 8);
    meet(warp().arrived, warp().generation, 32);
    return slots;
}
inline void enter() { kernels[now->block->kernel].body(); now->done = true; yield(); }

// Run the kernels one after the other, as dependent launches; return what went wrong, or null.
inline const char* run(unsigned seed) {
    chance.seed(seed), failure = nullptr;
    for (size_t k = 0; k < kernels.size(); k++) {
        const Kernel& kernel = kernels[k];
        for (unsigned i = 0; i < kernel.grid.x * kernel.grid.y; i++) {
            auto b = std::make_unique<Block>();
            b->room.assign(kernel.shared + 256, (char)0x7f);
            b->shared = (char*)(((uintptr_t)b->room.data() + 127) & ~(uintptr_t)127);
            memset(b->shared + kernel.shared, 0x55, 32);
            b->warps.resize(kernel.threads / 32);
            b->threads = b->live = kernel.threads, b->kernel = k, b->at = {i % kernel.grid.x, i / kernel.grid.x, 0};
            for (unsigned t = 0; t < kernel.threads; t++) {
                auto f = std::make_unique<Fiber>();
                f->stack.resize(24 << 10), f->block = b.get(), f->tid = t;
                getcontext(&f->context);
                f->context.uc_stack.ss_sp = f->stack.data(), f->context.uc_stack.ss_size = f->stack.size();
                f->context.uc_link = &host;
                makecontext(&f->context, enter, 0);
                fibers.push_back(std::move(f));
            }
            blocks.push_back(std::move(b));
        }
    }
    std::vector<unsigned> warps(fibers.size() / 32);
    for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
    for (size_t sweeps = 0; !failure && !kernels.back().ended; sweeps++) {
        if (sweeps > 100000) failure = "hangs";
        for (size_t k = 0; k < kernels.size(); k++) {
            bool let_go = true, ended = true;
            for (auto& b : blocks) if (b->kernel == (int)k) let_go &= b->let_go || !b->live, ended &= !b->live;
            kernels[k].ended = ended;
            if (k == 0) kernels[0].begun = true;
            if (k + 1 < kernels.size() && kernels[k].begun && let_go) kernels[k + 1].begun = true;
        }
        std::shuffle(warps.begin(), warps.end(), chance);
        for (unsigned w : warps) {
            if (!kernels[fibers[w * 32]->block->kernel].begun || chance() % 4 == 0) continue;
            const unsigned first = chance() % 32;
            for (unsigned i = 0; i < 32; i++) {
                now = fibers[w * 32 + (first + i) % 32].get();
                if (now->done) continue;
                swapcontext(&host, &now->context);
                if (failure) goto stop;
                if (now->done) now->block->live--;
            }
        }
        for (auto& b : blocks) deliver(*b, [](Copy& c) { return c.bar && --c.due <= 0; });
    }
stop:
    for (auto& b : blocks) {
        for (int i = 0; i < 32; i++)
            if (b->shared[kernels[b->kernel].shared + i] != 0x55) failure = "writes beyond shared memory";
        if (!failure && !b->copies.empty()) failure = "copies left behind";
    }
    fibers.clear(), blocks.clear(), kernels.clear();
    return failure;
}
}  // namespace emulator

#define threadIdx (Place{emulator::now->tid, 0, 0})
#define blockIdx (emulator::block().at)
#define gridDim (emulator::kernels[emulator::block().kernel].grid)

DEV float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
DEV u32 as_uint(float v) { u32 f; memcpy(&f, &v, 4); return f; }
DEV void sync_warp() { emulator::meet(emulator::warp().arrived, emulator::warp().generation, 32); }
DEV void sync_block() { auto& b = emulator::block(); emulator::meet(b.arrived, b.generation, b.threads); }
DEV int warp_of(int tid) { return tid >> 5; }
DEV u32 shfl_xor(u32 v, int m) { u64 a = v; return (u32)emulator::exchange(&a, 1)[(emulator::now->tid % 32) ^ m][0]; }
DEV float shfl_xor_f(float v, int m) { return as_float(shfl_xor(as_uint(v), m)); }
DEV u32 bytes_of(u32 a, u32 b, u32 selector) {
    const u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}
DEV int dot4(u32 a, u32 b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}
DEV void grid_launch() { emulator::block().let_go = true; }
DEV void grid_wait() {
    const int k = emulator::block().kernel;
    while (k && !emulator::kernels[k - 1].ended) emulator::yield();
}
template <class T> DEV T load_(const void* p) {
    if ((uintptr_t)p % sizeof(T)) emulator::fail("misaligned load");
    T v;
    memcpy(&v, p, sizeof(T));
    return v;
}
DEV uint4 load_written(const void* p) { return load_<uint4>(p); }
DEV uint4 load_weights(const void* p) { return load_<uint4>(p); }
DEV u16 load_written16(const void* p) { return load_<u16>(p); }
DEV u16 load_weights16(const void* p) { return load_<u16>(p); }
DEV bool elected() { return emulator::now->tid % 32 == 0; }
DEV void barrier_init(u64* bar) { *bar = 0; }
DEV void barriers_visible() {}
DEV bool barrier_passed(u64* bar, u32 parity) {
    if ((*bar & 1) != parity) return true;
    emulator::yield();
    return false;
}
DEV u64 stream_policy() { return 0; }
#define copy_chunk(dst, src, bar, policy) emulator::begin_copy(dst, src, bar, CHUNK)
DEV void copy_16(void* dst, const void* src) { emulator::begin_copy(dst, src, nullptr, 16); }
DEV void copies_commit() { emulator::now->groups++; }
template <int N> DEV void copies_wait() {  // of this lane, all but its last N groups
    auto* f = emulator::now;
    emulator::deliver(*f->block, [f](emulator::Copy& c) { return c.lane == f->tid && c.group + N < f->groups; });
}
DEV void multiply_codes(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // by the tables of PTX
    const u64 mine[6] = {a0, a1, a2, a3, b0, b1};
    auto s = emulator::exchange(mine, 6);
    const int lane = emulator::now->tid % 32;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + (i & 1);
        c[i] = 0;
        for (int k = 0; k < 32; k++) {
            const int from = k % 16 / 4, shift = 8 * (k % 4);
            const u64 a = s[row % 8 * 4 + from][row / 8 + 2 * (k / 16)], b = s[column * 4 + from][4 + k / 16];
            c[i] += (int)(uint8_t)(a >> shift) * (int)(int8_t)(b >> shift);
        }
    }
}
DEV float reciprocal_root(float v) { return 1.f / sqrtf(v); }
DEV float exponential(float v) { return expf(v); }
DEV float error_function(float v) { return erff(v); }
DEV u32 to_bfloat16(float v) { const u32 u = as_uint(v); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
