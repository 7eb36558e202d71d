// Paged attention for a CPU: keys and values are read where they lie, block by block.
//
// Nobody writes a score to memory: a softmax goes along with the reading, as in Milakov and
// Gimelshein, "Online normalizer calculation for softmax" (2018), and FlashAttention after it.
//
// Compiled for one model: -DHEAD_DIM, -DGROUP (query heads that share a KV head), and -DBF16
// where numbers are bfloat16.

#include "numbers.h"

// A head in vector registers of LANES floats: 16 (AVX-512) where that divides it. The compiler
// makes do with narrower registers if the processor has no such wide ones.
#define LANES (HEAD_DIM % 32 == 0 ? 16 : HEAD_DIM % 16 == 0 ? 8 : 4)
#define VECTORS (HEAD_DIM / LANES)
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef float four __attribute__((vector_size(16)));
typedef struct {
    floats part[VECTORS];
} head;

// bfloat16 comes in pairs: a vector of the numbers at even places, then one of those at odd ones.
// A dot product does not mind, if both sides are read so; store_head puts them back in line.
static inline head load_head(const number *from) {
    head x;
#ifdef BF16
    for (int i = 0; i < VECTORS; i += 2, from += 2 * LANES) {
        words pairs;
        memcpy(&pairs, from, sizeof pairs);
        x.part[i] = (floats)(pairs << 16);
        x.part[i + 1] = (floats)(pairs & 0xffff0000);
    }
#else
    memcpy(&x, from, sizeof x);
#endif
    return x;
}

static inline void store_head(number *to, const head *x) {
    for (int i = 0; i < VECTORS; i++)
        for (int lane = 0; lane < LANES; lane++) {
#ifdef BF16
            to[(i / 2 * LANES + lane) * 2 + i % 2] = narrow(x->part[i][lane]);
#else
            to[i * LANES + lane] = x->part[i][lane];
#endif
        }
}

static inline float dot(const head *x, const head *y) {
    union {
        floats all;
        four quarter[LANES / 4];
    } product = {x->part[0] * y->part[0]};
    for (int i = 1; i < VECTORS; i++) product.all += x->part[i] * y->part[i];
    four sum = product.quarter[0];
    for (int i = 1; i < LANES / 4; i++) sum += product.quarter[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline void prefetch_head(const number *from) {
    for (int i = 0; i < HEAD_DIM; i += 64 / sizeof(number)) __builtin_prefetch(from + i);
}

// -- decodes --------------------------------------------------------------------------------------

// One query head on its way along its sequence: a softmax that is not finished. `top` is the
// highest score so far; `total` and `sum` are the weights, and the values times their weights,
// with weight exp(score - top).
typedef struct {
    head query, sum;
    float total, top;
} reader;

#define TILE 16  // tokens whose scores are held at once

// Readers of one KV head read `tokens` <= TILE keys and values, `row` numbers apart. Blocks lie
// anywhere in the pool, where the processor does not look ahead: those to come, `ahead` numbers
// further, are called for while these are worked on.
static inline void read_tile(reader readers[GROUP], const number *keys, const number *values,
                             int64_t tokens, int64_t row, int64_t ahead) {
    float weight[GROUP][TILE];  // at first, scores
    for (int64_t t = 0; t < tokens; t++, keys += row) {
        const head key = load_head(keys);
        prefetch_head(keys + ahead);
        for (int g = 0; g < GROUP; g++) weight[g][t] = dot(&readers[g].query, &key);
    }
    head sum[GROUP];
    for (int g = 0; g < GROUP; g++) {
        float top = readers[g].top, fresh = 0;
        for (int64_t t = 0; t < tokens; t++) top = weight[g][t] > top ? weight[g][t] : top;
#pragma omp simd reduction(+ : fresh)
        for (int64_t t = 0; t < tokens; t++) {
            weight[g][t] = fast_exp(weight[g][t] - top);
            fresh += weight[g][t];
        }
        const float shrink = fast_exp(readers[g].top - top);  // a top that rose
        readers[g].top = top;
        readers[g].total = readers[g].total * shrink + fresh;
        for (int i = 0; i < VECTORS; i++) sum[g].part[i] = readers[g].sum.part[i] * shrink;
    }
    for (int64_t t = 0; t < tokens; t++, values += row) {
        const head value = load_head(values);
        prefetch_head(values + ahead);
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < VECTORS; i++) sum[g].part[i] += weight[g][t] * value.part[i];
    }
    for (int g = 0; g < GROUP; g++) readers[g].sum = sum[g];
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Paged attention of one-token sequences. Keys and values are read where they lie, block by
// block, each once for all query heads that share it; softmax goes along with the reading
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// A sequence's queries [heads, HEAD_DIM] lie `stride` numbers behind the former's. keys, values:
// [blocks, block_size, kv_heads, HEAD_DIM]; tables [sequences, max_blocks]; out [sequences,
// heads, HEAD_DIM], 0 for a sequence of length 0. Where sequences are fewer than threads, each
// is shared by `parts` of them, head by head.
void attend_decodes(number *out, const number *q, int64_t stride, const number *keys,
                    const number *values, const int32_t *tables, int64_t max_blocks,
                    const int32_t *lengths, int64_t sequences, int64_t kv_heads,
                    int64_t block_size, int64_t parts) {
    const int64_t row = kv_heads * HEAD_DIM;  // from one token to the next
    const float scale = 1 / sqrtf(HEAD_DIM);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = kv_heads * part / parts;
            const int64_t count = kv_heads * (part + 1) / parts - first;
            const int64_t length = lengths[s];
            const int32_t *table = tables + s * max_blocks;
            const number *query = q + s * stride + first * GROUP * HEAD_DIM;
            number *to = out + (s * kv_heads + first) * GROUP * HEAD_DIM;

            reader readers[count * GROUP];
            for (int64_t i = 0; i < count * GROUP; i++) {
                memset(&readers[i], 0, sizeof readers[i]);
                readers[i].top = -INFINITY;
                readers[i].query = load_head(query + i * HEAD_DIM);
                for (int d = 0; d < VECTORS; d++) readers[i].query.part[d] *= scale;
            }
            int64_t tokens;  // of one block, TILE at most
            for (int64_t start = 0; start < length; start += tokens) {
                const int64_t inside = start % block_size;
                tokens = least(least(TILE, block_size - inside), length - start);
                const int64_t slot = table[start / block_size] * block_size + inside;
                const int64_t after = least(start + tokens, length - 1);
                const int64_t next = table[after / block_size] * block_size + after % block_size;
                for (int64_t h = 0; h < count; h++) {
                    const int64_t at = slot * row + (first + h) * HEAD_DIM;
                    read_tile(readers + h * GROUP, keys + at, values + at, tokens, row,
                              (next - slot) * row);
                }
            }
            for (int64_t i = 0; i < count * GROUP; i++) {
                for (int d = 0; d < VECTORS; d++)
                    readers[i].sum.part[d] /= length ? readers[i].total : 1;
                store_head(to + i * HEAD_DIM, &readers[i].sum);
            }
        }
}

// -- prompts and chunks --------------------------------------------------------------------------

// Many queries of one sequence see the same keys, so this one is bound by arithmetic: products of
// small matrices, whose sums stay in registers. The rest is as above: a tile of keys after the
// other, and a softmax that goes along ("FlashAttention", Dao et al. 2022).

#define QUERIES 32  // tokens of a tile; each is GROUP rows, one a query head
#define KEYS 32
#define ROWS 12  // whose sums fit the registers, 2 vectors each
#define MOST_ROWS ((QUERIES * GROUP + ROWS - 1) / ROWS * ROWS)

// c [ROWS, columns] = a [ROWS, depth] b [depth, columns], or with `more`, added to what c was.
// The columns, a multiple of 2 LANES, are known to the compiler.
static inline __attribute__((always_inline)) void multiply(
    float *c, const float *a, const float *b, int64_t depth, const int columns, const int more) {
    for (int at = 0; at < columns; at += 2 * LANES) {
        floats left[ROWS], right[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            left[r] = right[r] = (floats){0};
            if (more) {
                memcpy(&left[r], c + r * columns + at, sizeof(floats));
                memcpy(&right[r], c + r * columns + at + LANES, sizeof(floats));
            }
        }
        for (int64_t i = 0; i < depth; i++) {
            floats first, second;
            memcpy(&first, b + i * columns + at, sizeof first);
            memcpy(&second, b + i * columns + at + LANES, sizeof second);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                left[r] += a[r * depth + i] * first;
                right[r] += a[r * depth + i] * second;
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            memcpy(c + r * columns + at, &left[r], sizeof(floats));
            memcpy(c + r * columns + at + LANES, &right[r], sizeof(floats));
        }
    }
}

// One KV head, and `count` <= QUERIES tokens from position `first` of their sequence on. q and
// out: the first token's first query head of this KV head; the next token's lie further by
// q_stride and out_stride. keys, values: this head in the pools, tokens `row` numbers apart.
static void attend_tile(number *out, int64_t out_stride, const number *q, int64_t q_stride,
                        const number *keys, const number *values, int64_t row,
                        const int32_t *table, int64_t block_size, int64_t first, int64_t count) {
    float query[MOST_ROWS * HEAD_DIM], sum[MOST_ROWS * HEAD_DIM] = {0}, weight[MOST_ROWS * KEYS];
    float key[HEAD_DIM * KEYS], value[KEYS * HEAD_DIM], top[MOST_ROWS], total[MOST_ROWS];
    const float scale = 1 / sqrtf(HEAD_DIM);
    for (int r = 0; r < MOST_ROWS; r++) {
        const int there = r < count * GROUP;
        const number *from = q + r / GROUP * q_stride + r % GROUP * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++)
            query[r * HEAD_DIM + d] = there ? widen(from[d]) * scale : 0;
        top[r] = -INFINITY;
        total[r] = 0;
    }
    const int64_t rows = (count * GROUP + ROWS - 1) / ROWS * ROWS;
    for (int64_t start = 0; start < first + count; start += KEYS) {
        const int64_t tokens = least(KEYS, first + count - start);
        for (int64_t t = 0; t < KEYS; t++) {  // keys in columns; behind the last, zeros
            const int64_t at = start + least(t, tokens - 1);
            const int64_t slot = table[at / block_size] * block_size + at % block_size;
            const number *k = keys + slot * row, *v = values + slot * row;
            for (int d = 0; d < HEAD_DIM; d++) {
                key[d * KEYS + t] = widen(k[d]);
                value[t * HEAD_DIM + d] = t < tokens ? widen(v[d]) : 0;
            }
        }
        for (int64_t r = 0; r < rows; r += ROWS)
            multiply(weight + r * KEYS, query + r * HEAD_DIM, key, HEAD_DIM, KEYS, 0);
        for (int64_t r = 0; r < rows; r++) {
            float *w = weight + r * KEYS, *x = sum + r * HEAD_DIM, highest = top[r], fresh = 0;
            const int64_t visible = first + r / GROUP + 1 - start;
            for (int64_t t = visible < 0 ? 0 : visible; t < KEYS; t++) w[t] = -INFINITY;
#pragma omp simd reduction(max : highest)
            for (int t = 0; t < KEYS; t++) highest = w[t] > highest ? w[t] : highest;
#pragma omp simd reduction(+ : fresh)
            for (int t = 0; t < KEYS; t++) {
                w[t] = fast_exp(w[t] - highest);
                fresh += w[t];
            }
            const float shrink = fast_exp(top[r] - highest);
            top[r] = highest;
            total[r] = total[r] * shrink + fresh;
#pragma omp simd
            for (int d = 0; d < HEAD_DIM; d++) x[d] *= shrink;
        }
        for (int64_t r = 0; r < rows; r += ROWS)
            multiply(sum + r * HEAD_DIM, weight + r * KEYS, value, KEYS, HEAD_DIM, 1);
    }
    for (int r = 0; r < count * GROUP; r++) {
        number *to = out + r / GROUP * out_stride + r % GROUP * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) to[d] = narrow(sum[r * HEAD_DIM + d] / total[r]);
    }
}

// Paged attention of sequences with several query tokens, cut into tiles of QUERIES. Of each
// tile: its sequence, its first packed token, that token's position, and how many there are.
// The rest is as for attend_decodes.
void attend_chunks(number *out, const number *q, int64_t stride, const number *keys,
                   const number *values, const int32_t *tables, int64_t max_blocks,
                   const int32_t *tiles, int64_t num_tiles, int64_t kv_heads,
                   int64_t block_size) {
    const int64_t row = kv_heads * HEAD_DIM;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = num_tiles - 1; i >= 0; i--)  // a sequence's last tiles take the longest
        for (int64_t h = 0; h < kv_heads; h++) {
            const int32_t *tile = tiles + 4 * i;
            const int64_t head = h * GROUP * HEAD_DIM;
            attend_tile(out + tile[1] * row * GROUP + head, row * GROUP,
                        q + tile[1] * stride + head, stride, keys + h * HEAD_DIM,
                        values + h * HEAD_DIM, row, tables + tile[0] * max_blocks, block_size,
                        tile[2], tile[3]);
        }
}

int64_t queries(void) { return QUERIES; }
