// A matrix product for a CPU: y [tokens, out] = x [tokens, in] by a matrix [out, in], transposed.
//
// A decode step multiplies a few tokens by every weight of the model. Weights come from memory
// and are used once a token, so with few tokens memory is the limit, and with many arithmetic is.
// The loop below is near both: weights are read as one stream that is called for early, and each
// is used for all ROWS tokens of a tile while it is in a register.
//
// The matrix is packed (linear.py): panels of COLUMNS outputs; in a panel, input by input, the
// weights of its outputs side by side. With -DBF16 inputs go in pairs, as the processor's
// instruction wants them. With -DINT8 weights are 8-bit whole numbers, four inputs in a word, and
// each output has a scale; x is then still a float (or with -DBF16, a bfloat16).

#include "numbers.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Registers: ROWS * 2 sums, a step's weights, one of x. AVX-512 and ARM have 32, AVX has 16.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES == 8
#define ROWS 6
#elif defined(INT8)
#define ROWS 8
#else
#define ROWS 12
#endif
#define COLUMNS (2 * LANES)

typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef struct {
    words left, right;
} step;  // the weights of a panel for INPUTS inputs, as they lie in memory

// From a word's lanes to what is multiplied: `weights`, for INPUTS inputs of x at once.
#if defined(INT8)
#define INPUTS 4
typedef int32_t wholes __attribute__((vector_size(LANES * 4)));
typedef struct {
    floats of[INPUTS];
} weights;
static inline weights unpack(words w) {  // the byte in question to the top, and down with its sign
    weights result;
    for (int i = 0; i < INPUTS; i++)
        result.of[i] = __builtin_convertvector((wholes)(w << (24 - 8 * i)) >> 24, floats);
    return result;
}
static inline floats multiply_add(floats sum, const number *x, weights w) {
    for (int i = 0; i < INPUTS; i++) sum += widen(x[i]) * w.of[i];
    return sum;
}
#elif defined(BF16)
#define INPUTS 2
typedef words weights;
static inline weights unpack(words w) { return w; }
static inline floats multiply_add(floats sum, const number *x, weights w) {
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
#else
    sum += widen(pair) * (floats)(w << 16);
    return sum + widen(pair >> 16) * (floats)(w & 0xffff0000);
#endif
}
#else
#define INPUTS 1
typedef floats weights;
static inline weights unpack(words w) { return (weights)w; }
static inline floats multiply_add(floats sum, const number *x, weights w) { return sum + *x * w; }
#endif

// The first `count` of a vector's numbers, rounded.
static inline void store(number *to, floats x, int64_t count) {
#ifdef BF16  // narrow(), for a vector
    typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
    const words bits = (words)x, nan = (words)(x != x);
    const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const halves values = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
#else
    const floats values = x;
#endif
    if (count >= LANES)
        memcpy(to, &values, sizeof values);
    else if (count > 0)
        memcpy(to, &values, count * sizeof(number));
}

// `rows` tokens by one panel, `rows` being known to the compiler. `ahead` goes through a part of
// the panel that is next, a step of it for each `share` of ours: with all tiles of this panel,
// through the whole of it.
static inline __attribute__((always_inline)) void tile(
    const int rows, number *y, int64_t out, const number *x, int64_t in, const step *panel,
    const step *ahead, int64_t share, const float *scale, int64_t columns) {
    floats left[ROWS], right[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) left[r] = right[r] = (floats){0};
    (void)scale;
    int64_t due = share;
    for (int64_t i = 0; i < in; i += INPUTS, panel++) {
        const weights first = unpack(panel->left), second = unpack(panel->right);
        __builtin_prefetch(ahead);
        __builtin_prefetch(&ahead->right);
        if (--due == 0) ahead++, due = share;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            left[r] = multiply_add(left[r], x + r * in + i, first);
            right[r] = multiply_add(right[r], x + r * in + i, second);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
#ifdef INT8
        floats scales[2];
        memcpy(scales, scale, sizeof scales);
        left[r] *= scales[0], right[r] *= scales[1];
#endif
        store(y + r * out, left[r], columns);
        store(y + r * out + LANES, right[r], columns - LANES);
    }
}

// scale: [out], up to a multiple of COLUMNS; read with -DINT8 only.
void matmul(number *y, const number *x, const step *packed, const float *scale, int64_t tokens,
            int64_t in, int64_t out) {
    const int64_t panels = (out + COLUMNS - 1) / COLUMNS, steps = in / INPUTS;
    const int64_t tiles = (tokens + ROWS - 1) / ROWS, rows = (tokens + tiles - 1) / tiles;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        const step *panel = packed + p * steps;
        const int64_t columns = out - p * COLUMNS;  // and those of the panels behind
        for (int64_t t = 0; t < tiles; t++) {
            number *to = y + t * rows * out + p * COLUMNS;
            const number *from = x + t * rows * in;
            const step *ahead = panel + steps + t * steps / tiles;
            const float *scales = scale + p * COLUMNS;
            const int64_t left = tokens - t * rows;
            switch (left < rows ? left : rows) {
#define CASE(N) \
    case N:     \
        tile(N, to, out, from, in, panel, ahead, tiles, scales, columns); \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS >= 8
                CASE(7) CASE(8)
#endif
#if ROWS == 12
                CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}

int64_t columns(void) { return COLUMNS; }
