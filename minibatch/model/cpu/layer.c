// What a Llama layer does between its matrices and beside attention, one loop each, for a CPU.
//
// torch spells each of these as five to ten calls. On a small batch a call costs more than its
// work, and every call writes its whole result to memory for the next one to read. Here a number
// is read once and written once; in between it stays in a register, as a float.
//
// Compiled with -DHEAD_DIM, and -DBF16 where numbers are bfloat16.

#include "numbers.h"

#define WORTH_SHARING 32768  // numbers; less is done before a second thread has begun

// stream += added (unless NULL); normed = stream / rms(stream) * weight. All are [rows, size].
void add_norm(number *normed, number *stream, const number *added, const number *weight,
              int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > WORTH_SHARING)
    for (int64_t row = 0; row < rows; row++) {
        number *x = stream + row * size, *out = normed + row * size;
        if (added) {
            const number *more = added + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) x[i] = narrow(widen(x[i]) + widen(more[i]));
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += widen(x[i]) * widen(x[i]);
        const float scale = 1 / sqrtf(squares / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(x[i]) * scale * widen(weight[i]));
    }
}

// Rope, and the KV cache's store. qkv [tokens, heads + 2 kv_heads, HEAD_DIM]: queries and keys
// are turned where they lie; keys and values are copied to row slots[token] of the pools
// [slots, kv_heads, HEAD_DIM], unless it is negative. cosine and sine: [tokens, HEAD_DIM], the
// sines' first half with the sign changed (see rotary.py).
void turn_and_store(number *qkv, const number *cosine, const number *sine, number *keys,
                    number *values, const int64_t *slots, int64_t tokens, int64_t heads,
                    int64_t kv_heads) {
    const int64_t half = HEAD_DIM / 2, row = kv_heads * HEAD_DIM;
    const int64_t stride = heads * HEAD_DIM + 2 * row;
#pragma omp parallel for if (tokens * stride > WORTH_SHARING)
    for (int64_t token = 0; token < tokens; token++) {
        number *head = qkv + token * stride;
        const number *c = cosine + token * HEAD_DIM, *s = sine + token * HEAD_DIM;
        for (int64_t i = 0; i < heads + kv_heads; i++, head += HEAD_DIM) {
#pragma omp simd
            for (int64_t d = 0; d < half; d++) {
                const float a = widen(head[d]), b = widen(head[d + half]);
                head[d] = narrow(a * widen(c[d]) + b * widen(s[d]));
                head[d + half] = narrow(b * widen(c[d + half]) + a * widen(s[d + half]));
            }
        }
        if (slots[token] < 0) continue;
        memcpy(keys + slots[token] * row, head - row, row * sizeof(number));
        memcpy(values + slots[token] * row, head, row * sizeof(number));
    }
}

// out = silu(gate) * up. gate_up [rows, 2 inner], out [rows, inner].
void silu_mul(number *out, const number *gate_up, int64_t rows, int64_t inner) {
#pragma omp parallel for if (rows * inner > WORTH_SHARING)
    for (int64_t row = 0; row < rows; row++) {
        const number *gate = gate_up + row * 2 * inner, *up = gate + inner;
        number *to = out + row * inner;
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            const float g = widen(gate[i]);
            to[i] = narrow(g / (1 + fast_exp(-g)) * widen(up[i]));
        }
    }
}
