// y = residual + act(W x + bias) for one row of bfloat16 and weights of 4 bits, read as a stream by each warp.
// The host's half is stream.py; tests run this file on a CPU (tests/compile/cuda/emulator).
//
// Weights: w = (code - 8) * scale + offset, factors by groups of GROUP inputs. Packed in tiles of 16 rows, a tile in
// chunks of 256 inputs, the last of which may be filled up with zeros. Tile t of W rows holds rows 8t .. 8t + 7 (its rows 0 to 7) and W/2 + 8t .. (8 to 15), so
// that a gate and what it lets through meet in one lane. A chunk of CHUNK bytes:
//   4 units of 64 inputs, 512 bytes each: lane 4r + q has 16 bytes, words {row r, 8 + r} x {inputs of half h}, i.e.
//     words 0, 1 (rows r, 8 + r; bytes 0-3), 2, 3 (rows r, 8 + r; bytes 4-7). Byte b of eight: input 8q + b of the unit
//     in the low four bits, input 32 + 8q + b in the high ones. This is operand A of mma.m16n8k32.
//   factors: [r of 8][group of 256 / GROUP][row r, row 8 + r], 4 bytes each: bfloat16 scale, then bfloat16 offset.
//
// Inputs are normalised first, if there is a norm, and become pairs of int8 by XG inputs: x = scale * (254 a + b), to
// 1 / 64,516 of their largest one. a and b are columns of one product of the matrix units, so the second one is free:
//   y = sum over groups of s * sum(code * x) + (o - 8 s) * sum(x), integers within a group, exact in int32.
//
// Block b of the grid (blocks, rows of x) has the tiles first_tile(b) .. first_tile(b + 1); their chunks follow each
// other in memory. Warp w takes chunks w, w + WARPS, ... through a ring of its own in shared memory: no barrier in the
// loop. Sums of (tile, warp) meet in shared memory and are added in the order of warps: no atomics, and a row's bits
// depend on that row, the weights and the number of blocks alone.
//
// Dependent launch (see pdl.py): before grid_wait only weights are read, which no kernel writes. Every thread of every
// block waits, and no block ends before. Successors may begin as soon as a block has asked for its last weights.
//
// Shared memory, in this order: rings [WARPS][stages][CHUNK], barriers [WARPS][stages] of 8 bytes, squares [WARPS]
// floats in 128 bytes, x int8 [chunks 4][a, b][64], then {scale / 16, scale * sum of 254 a + b} by XG inputs, sums
// [tiles][WARPS][16].
//
// -D GROUP (32, 64, 128), -D BULK (1: bulk copies and mbarriers, 9.0 and up; 0: cp.async, 8.0 and up).
#ifdef EMULATOR
#include "emulator.h"
#else
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define DEV __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__
#define SHARED(name) extern __shared__ __align__(128) char name[]
#endif

#define WARPS 8
#define THREADS (WARPS * 32)
#define UNITS 4                      // of a chunk, 64 inputs each
#define FACTORS (UNITS * 64 / GROUP)  // groups of a chunk
#define CODES (UNITS * 512)
#define CHUNK (CODES + FACTORS * 64)
#define XG (GROUP == 32 ? 32 : 64)   // inputs that are rounded to int8 together
#define PIECES 3                     // pieces of 16 inputs that a thread loads at once

struct Op {  // stream.py has the same fields
    u64 w, x, y, norm, residual, bias;  // addresses; norm [K], residual [rows, N] and bias [W] may be 0
    int tiles, chunks, K, N;            // chunks of a tile, K / 256 rounded up; N: outputs, W or W/2 if gated
    int gate, stages;                   // gate 0: none, 1 silu, 2 gelu, 3 gelu by tanh
    float eps;
    int unused;
};

#ifndef EMULATOR
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV float as_float(u32 v) { return __uint_as_float(v); }
DEV u32 as_uint(float v) { return __float_as_uint(v); }
DEV u32 shfl_xor(u32 v, int m) { return __shfl_xor_sync(~0u, v, m); }
DEV float shfl_xor_f(float v, int m) { return __shfl_xor_sync(~0u, v, m); }
DEV void sync_warp() { __syncwarp(); }
DEV void sync_block() { __syncthreads(); }
DEV int warp_of(int tid) { return __shfl_sync(~0u, tid >> 5, 0); }  // so that the compiler knows it uniform
DEV u32 bytes_of(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEV int dot4(u32 a, u32 b, int c) { return __dp4a((int)a, (int)b, c); }
DEV void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void grid_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// What kernels write is read past the first level of cache; weights by the read-only path.
DEV uint4 load_written(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEV u16 load_written16(const void* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
DEV uint4 load_weights(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEV u16 load_weights16(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
#if BULK
DEV bool elected() {
    u32 ok;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(ok));
    return ok;
}
DEV void barrier_init(u64* bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bar)) : "memory"); }
DEV void barriers_visible() {  // to the copies, which another proxy makes
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV bool barrier_passed(u64* bar, u32 parity) {
    u32 ok;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
    return ok;
}
DEV u64 stream_policy() {  // weights are read once a step: first to leave the second level of cache
    u64 p;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DEV void copy_chunk(void* dst, const void* src, u64* bar, u64 policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "n"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(dst)), "l"(src), "n"(CHUNK), "r"(shared_address(bar)), "l"(policy) : "memory");
}
#else
DEV void copy_16(void* dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory");
}
DEV void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#endif
// c = A B, A: 16 rows x 32 codes, B: 32 x 8 columns of int8. A lane gives column lane / 4, which is a where that is even
// and b where it is odd, and gets of rows r = lane / 4 and 8 + r the sums c[0] and c[2] with a, c[1] and c[3] with b.
DEV void multiply_codes(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
DEV float reciprocal_root(float v) { return rsqrtf(v); }
DEV float exponential(float v) { return __expf(v); }
DEV float error_function(float v) { return erff(v); }
DEV u32 to_bfloat16(float v) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.f), "f"(v));
    return r;
}
#endif

DEV float low(u32 v) { return as_float(v << 16); }
DEV float high(u32 v) { return as_float(v & 0xffff0000u); }
DEV void values16(const uint4& a, const uint4& b, float* v) {
    const u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[2 * i] = low(w[i]), v[2 * i + 1] = high(w[i]);
}

struct Layout {  // of shared memory: offsets
    char* smem;
    int ring, bars, squares, xs, scales, sums;
    DEV_MEMBER float* f(int at) const { return (float*)(smem + at); }
};

DEV Layout layout_of(char* smem, int warp, int stages, int inputs) {
    Layout l;
    l.smem = smem;
    l.ring = warp * stages * CHUNK;
    int at = WARPS * stages * CHUNK;
    l.bars = at + warp * stages * 8;
    at += WARPS * stages * 8;
    l.squares = at;
    at += 128;
    l.xs = at;
    at += 2 * inputs;
    l.scales = at;
    l.sums = at + inputs / XG * 8;
    return l;
}

// A row of x into shared memory, normalised and rounded. A thread takes pieces of 16 inputs; those beyond K are zero.
DEV void load_row(const Op& op, const Layout& l, int tid) {
    const int given = op.K / 16, P = op.chunks * 16, lane = tid & 31, first = tid - lane;
    const char* x = (const char*)op.x + (u64)blockIdx.y * op.K * 2;
    const char* norm = (const char*)op.norm;
    uint4 v[PIECES][2], nv[PIECES][2];
    float factor = 1.f;
    const bool once = P <= PIECES * THREADS;  // pass 1 finds in registers what pass 0 has loaded
    for (int pass = norm ? 0 : 1; pass < 2; pass++) {
        float squares = 0.f;
        for (int base = first; base < P; base += PIECES * THREADS) {
            if (pass == 0 || !norm || !once) {
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    const int p = base + i * THREADS + lane;
                    v[i][0] = v[i][1] = nv[i][0] = nv[i][1] = uint4{0, 0, 0, 0};
                    if (p < given) {
                        v[i][0] = load_written(x + p * 32), v[i][1] = load_written(x + p * 32 + 16);
                        if (norm) nv[i][0] = load_weights(norm + p * 32), nv[i][1] = load_weights(norm + p * 32 + 16);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const int start = base + i * THREADS, p = start + lane;
                if (start >= P) break;  // the same in all lanes of a warp
                float f[16];
                values16(v[i][0], v[i][1], f);
                if (pass == 0) {
#pragma unroll
                    for (int j = 0; j < 16; j++) squares += f[j] * f[j];
                    continue;
                }
                if (norm) {
                    float n[16];
                    values16(nv[i][0], nv[i][1], n);
#pragma unroll
                    for (int j = 0; j < 16; j++) f[j] *= factor * n[j];
                }
                float top = 0.f;
#pragma unroll
                for (int j = 0; j < 16; j++) top = fmaxf(top, fabsf(f[j]));
                top = fmaxf(top, shfl_xor_f(top, 1));
                if (XG == 64) top = fmaxf(top, shfl_xor_f(top, 2));
                const float inverse = top > 1e-30f ? 127.f / top : 0.f;
                u32 a[4], b[4];
                int sum_a = 0, sum_b = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float magic = 12582912.f;  // 1.5 * 2^23: with it added, the lowest byte is the rounded number
                    u32 va[4], vb[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const float first = fmaf(f[4 * j + k], inverse, magic);
                        const float rest = fmaf(f[4 * j + k], inverse, magic - first);
                        va[k] = as_uint(first), vb[k] = as_uint(fmaf(rest, 254.f, magic));
                    }
                    a[j] = bytes_of(bytes_of(va[0], va[1], 0x0040), bytes_of(va[2], va[3], 0x0040), 0x5410);
                    b[j] = bytes_of(bytes_of(vb[0], vb[1], 0x0040), bytes_of(vb[2], vb[3], 0x0040), 0x5410);
                    sum_a = dot4(a[j], 0x01010101u, sum_a), sum_b = dot4(b[j], 0x01010101u, sum_b);
                }
                int sum = sum_a * 254 + sum_b;
                sum += (int)shfl_xor((u32)sum, 1);
                if (XG == 64) sum += (int)shfl_xor((u32)sum, 2);
                if (p < P) {
                    // Inputs 16 j .. 16 j + 15 of a unit, j = p % 4: half j / 2, eights 2 (j % 2) and the next one.
                    // Lane q of the products reads eight q of both halves at 16 q.
                    char* at = l.smem + l.xs + p / 4 * 128 + (p & 1) * 32 + (p >> 1 & 1) * 8;
                    *(uint2*)at = uint2{a[0], a[1]}, *(uint2*)(at + 16) = uint2{a[2], a[3]};
                    *(uint2*)(at + 64) = uint2{b[0], b[1]}, *(uint2*)(at + 80) = uint2{b[2], b[3]};
                    if (p % (XG / 16) == 0) {
                        const float scale = top * (1.f / (127.f * 254.f));
                        *(float2*)(l.f(l.scales) + p / (XG / 16) * 2) = float2{scale * (1.f / 16.f), scale * (float)sum};
                    }
                }
            }
        }
        if (pass == 0) {
#pragma unroll
            for (int i = 1; i < 32; i *= 2) squares += shfl_xor_f(squares, i);
            if (lane == 0) l.f(l.squares)[tid / 32] = squares;
            sync_block();
            float total = 0.f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) total += l.f(l.squares)[i];
            factor = reciprocal_root(total / op.K + op.eps);
        }
    }
}

struct Chunk {  // a lane's part
    uint4 q[UNITS];
    uint4 f[FACTORS / 2];  // of two groups: row r, row 8 + r
};

DEV void take_chunk(const char* at, int lane, Chunk& k) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) k.q[i] = *(const uint4*)(at + i * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < FACTORS / 2; i++) k.f[i] = *(const uint4*)(at + CODES + (lane >> 2) * FACTORS * 8 + i * 16);
}

// One group: acc += s * scale * c + (o - 8 s) * (scale * sum), rows r and 8 + r; c is 16 times the sum of products with
// a and b. At most 64 * 15 * 16 * 127 * 255: below 2^29.
DEV void add_group(float* acc, u32 f0, u32 f1, const float2& x, const int* c) {
    const float s0 = low(f0), s1 = low(f1), o0 = fmaf(s0, -8.f, high(f0)), o1 = fmaf(s1, -8.f, high(f1));
    acc[0] = fmaf(o0, x.y, fmaf(s0, (float)(c[0] * 254 + c[1]) * x.x, acc[0]));
    acc[1] = fmaf(o1, x.y, fmaf(s1, (float)(c[2] * 254 + c[3]) * x.x, acc[1]));
}

// xs: this lane's bytes of the chunk's first unit; scales: those of its first group. acc: rows r and 8 + r.
DEV void multiply_chunk(const Chunk& k, const char* xs, const float* scales, float* acc) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const uint4 q = k.q[u];
        const uint4 b = *(const uint4*)(xs + u * 128);
        const u32 L = 0x0f0f0f0fu, H = 0xf0f0f0f0u;
        int lo[4], hi[4];
        multiply_codes(lo, q.x & L, q.y & L, q.z & L, q.w & L, b.x, b.y);
        multiply_codes(hi, q.x & H, q.y & H, q.z & H, q.w & H, b.z, b.w);
#pragma unroll
        for (int i = 0; i < 4; i++) lo[i] = GROUP == 32 ? lo[i] * 16 : lo[i] * 16 + hi[i];
#if GROUP == 32
        const uint4 f = k.f[u];
        const float4 x = *(const float4*)(scales + 4 * u);
        add_group(acc, f.x, f.y, float2{x.x, x.y}, lo);
        add_group(acc, f.z, f.w, float2{x.z, x.w}, hi);
#else
        const int g = u * 64 / GROUP;
        const u32 f0 = g & 1 ? k.f[g / 2].z : k.f[g / 2].x, f1 = g & 1 ? k.f[g / 2].w : k.f[g / 2].y;
        const float2 x = *(const float2*)(scales + 2 * u);
        add_group(acc, f0, f1, x, lo);
#endif
    }
}

// A warp's sums of a tile into shared memory. All four lanes of a row have them.
DEV void put_sums(float* acc, float* sums, int tile, int warp, int lane) {
    float* at = sums + (tile * WARPS + warp) * 16;
    if ((lane & 3) == 0) at[lane >> 2] = acc[0], at[(lane >> 2) + 8] = acc[1];
    acc[0] = acc[1] = 0.f;
}

DEV void clear_sums(float* sums, int tiles, int tid) {
    for (int i = tid; i < tiles * WARPS * 4; i += THREADS) ((uint4*)sums)[i] = uint4{0, 0, 0, 0};
}

DEV float bfloat16_at(u64 p, u64 n) { return low(load_written16((const u16*)p + n)); }

DEV float activated(float x, int gate) {
    if (gate == 1) return x / (1.f + exponential(-x));
    if (gate == 2) return 0.5f * x * (1.f + error_function(x * 0.7071067811865476f));
    return x / (1.f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));  // 0.5 (1 + tanh u) = sigmoid 2 u
}

DEV void store(const Op& op, const float* sums, int t0, int tiles, int tid) {
    const int each = op.gate ? 8 : 16, half = op.tiles * 8;  // half of W
    for (int i = tid; i < tiles * each; i += THREADS) {
        const int tile = i / each, r = i % each;
        const float* at = sums + tile * WARPS * 16 + r;
        float sum = 0.f, up = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            sum += at[w * 16];
            if (op.gate) up += at[w * 16 + 8];
        }
        const int row = (t0 + tile) * 8 + (r & 7) + (r >> 3) * half;  // of W; gated: of y, too
        if (op.bias) {
            sum += low(load_weights16((const u16*)op.bias + row));
            if (op.gate) up += low(load_weights16((const u16*)op.bias + half + row));
        }
        if (op.gate) sum = activated(sum, op.gate) * up;
        const u64 n = (u64)blockIdx.y * op.N + row;
        if (op.residual) sum += low(load_written16((const u16*)op.residual + n));
        ((u16*)op.y)[n] = (u16)to_bfloat16(sum);
    }
}

struct Ring {  // of a warp
    char* base;
    u64* bars;
    u64 policy;
    int stages, taken, asked;  // stages of the next chunk to take, and to ask for
    u32 parity;
};

DEV void ring_begin(Ring& r, const Layout& l, int stages, int lane) {
    r.base = l.smem + l.ring, r.bars = (u64*)(l.smem + l.bars);
    r.stages = stages, r.taken = r.asked = 0, r.parity = 0;
#if BULK
    r.policy = stream_policy();
    if (lane == 0) {
        for (int i = 0; i < stages; i++) barrier_init(r.bars + i);
        barriers_visible();
    }
    sync_warp();
#endif
}

// Ask for a chunk. All lanes have taken what the stage held.
DEV void ring_ask(Ring& r, const char* src, int lane) {
    char* dst = r.base + r.asked * CHUNK;
#if BULK
    if (elected()) copy_chunk(dst, src, r.bars + r.asked, r.policy);
#else
#pragma unroll
    for (int at = 0; at < CHUNK; at += 512)
        if (at + lane * 16 < CHUNK) copy_16(dst + at + lane * 16, src + at + lane * 16);
#endif
    r.asked = r.asked + 1 == r.stages ? 0 : r.asked + 1;
}

// cp.async counts groups of copies: one for each stage at first, then one for each chunk taken, even if it is empty.
DEV void ring_commit() {
#if !BULK
    copies_commit();
#endif
}

DEV const char* ring_wait(Ring& r) {
#if BULK
    while (!barrier_passed(r.bars + r.taken, r.parity)) {}
#else
    if (r.stages == 4) copies_wait<3>();
    else if (r.stages == 3) copies_wait<2>();
    else if (r.stages == 2) copies_wait<1>();
    else copies_wait<0>();
    sync_warp();  // other lanes have copied parts of the chunk
#endif
    return r.base + r.taken * CHUNK;
}

DEV void ring_next(Ring& r) {
    if (++r.taken == r.stages) r.taken = 0, r.parity ^= 1;
}

DEV int first_tile(int tiles, int block, int blocks) { return (int)((long long)tiles * block / blocks); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) stream_product(const __grid_constant__ Op op) {
    SHARED(smem);
    const int tid = threadIdx.x, warp = warp_of(tid), lane = tid & 31;
    const Layout l = layout_of(smem, warp, op.stages, op.chunks * 256);
    const int t0 = first_tile(op.tiles, blockIdx.x, gridDim.x), t1 = first_tile(op.tiles, blockIdx.x + 1, gridDim.x);
    const int all = (t1 - t0) * op.chunks, n = all > warp ? (all - warp + WARPS - 1) / WARPS : 0;
    const char* src = (const char*)op.w + ((u64)t0 * op.chunks + warp) * CHUNK;
    Ring ring;
    ring_begin(ring, l, op.stages, lane);
    int asked = 0;
    for (; asked < op.stages; asked++) {
        if (asked < n) ring_ask(ring, src + (u64)asked * WARPS * CHUNK, lane);
        ring_commit();
    }
    if (asked >= n) grid_launch();
    clear_sums(l.f(l.sums), t1 - t0, tid);
    grid_wait();
    load_row(op, l, tid);
    sync_block();

    const char* xs = smem + l.xs + (lane >> 2 & 1) * 64 + (lane & 3) * 16;
    const float* scales = l.f(l.scales);
    float acc[2] = {0.f, 0.f};
    int chunk = warp, tile = 0;  // of the next chunk: its place in its tile
    while (chunk >= op.chunks) chunk -= op.chunks, tile++;
    for (int i = 0; i < n; i++) {
        Chunk k;
        take_chunk(ring_wait(ring), lane, k);
        multiply_chunk(k, xs + chunk * 512, scales + chunk * (256 / XG) * 2, acc);
        sync_warp();  // all lanes have taken the chunk
        if (asked < n) {
            ring_ask(ring, src + (u64)asked * WARPS * CHUNK, lane);
            if (++asked == n) grid_launch();
        }
        ring_commit();
        ring_next(ring);
        chunk += WARPS;
        if (chunk >= op.chunks || i + 1 == n) {
            put_sums(acc, l.f(l.sums), tile, warp, lane);
            while (chunk >= op.chunks) chunk -= op.chunks, tile++;
        }
    }
    sync_block();
    store(op, l.f(l.sums), t0, t1 - t0, tid);
}
