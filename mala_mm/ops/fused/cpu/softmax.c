/* Softmax attention with the rotary embedding, computed in float32, for one head width (WIDTH) and
 * one type of the inputs and outputs (FLOAT32, BFLOAT16 or FLOAT16).
 *
 * Keys are turned and transposed, values copied, into blocks of WIDTH tokens once; then every block
 * of queries walks over them with a running maximum (p->chunk is BLOCK: a piece is such a block).
 * Scores never leave the cache, forward and backward.
 */
#define DEEP WIDTH
#include "tokens.h"

typedef float square[WIDTH][WIDTH] __attribute__((aligned(64)));

#define MASKED -1e30f

static inline float exponential(float x) {
    x *= 1.44269504f;
    x = x < -126 ? -126 : x;
    float whole = rintf(x), rest = x - whole;
    float e = 1.5353362e-4f; /* Taylor's series around 0, |rest| <= 1/2 */
    e = e * rest + 1.3333558e-3f;
    e = e * rest + 9.6181291e-3f;
    e = e * rest + 5.5504109e-2f;
    e = e * rest + 2.4022651e-1f;
    e = e * rest + 6.9314718e-1f;
    e = e * rest + 1;
    union {
        uint32_t bits;
        float value;
    } power = {(uint32_t)((int32_t)whole + 127) << 23};
    return e * power.value;
}

static int64_t key_blocks(const problem *p) {
    return (p->height * p->width + WIDTH - 1) / WIDTH;
}

/* In bfloat16 the two products of the forward pass multiply pairs, where the processor does; sums
 * stay float32. An operand is then half as long: pairs of channels or, of weights and values, of
 * tokens. */
#if defined BFLOAT16 && defined __AVX512BF16__
#include <immintrin.h>
typedef uint32_t pairs[WIDTH / 2];

/* Returns the rounded rows, in out, which may lie where in does. */
static pairs *round_rows(pairs *out, float (*in)[WIDTH], int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < WIDTH; j += 2 * LANES) {
            __m512 low = _mm512_loadu_ps(in[i] + j), high = _mm512_loadu_ps(in[i] + j + LANES);
            _mm512_storeu_si512(out[i] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    return out;
}

/* A square as pairs of its rows, in the same memory. */
static void round_columns(square x) {
    for (int i = 0; i < WIDTH; i += 2)
        for (int j = 0; j < WIDTH; j++) {
            uint32_t pair = narrow(x[i][j]) | (uint32_t)narrow(x[i + 1][j]) << 16;
            memcpy(&x[i / 2][j], &pair, sizeof pair);
        }
}

static inline __attribute__((always_inline)) void multiply_rounded(float (*out)[WIDTH], int n,
                                                                   pairs *a, float (*b)[WIDTH],
                                                                   int add) {
    for (int j = 0; j < WIDTH; j += LANES * WIDE)
        for (int i = 0; i < n; i += TALL) {
            __m512 sum[TALL][WIDE];
            for (int r = 0; r < TALL; r++)
                for (int c = 0; c < WIDE; c++)
                    sum[r][c] = add ? _mm512_loadu_ps(&out[i + r][j + LANES * c])
                                    : _mm512_setzero_ps();
            for (int k = 0; k < WIDTH / 2; k++)
#pragma GCC unroll 8
                for (int r = 0; r < TALL; r++)
#pragma GCC unroll 2
                    for (int c = 0; c < WIDE; c++)
                        sum[r][c] = _mm512_dpbf16_ps(
                            sum[r][c], (__m512bh)_mm512_set1_epi32(a[i + r][k]),
                            (__m512bh)_mm512_loadu_si512(&b[k][j + LANES * c]));
            for (int r = 0; r < TALL; r++)
                for (int c = 0; c < WIDE; c++)
                    _mm512_storeu_ps(&out[i + r][j + LANES * c], sum[r][c]);
        }
}
#else
typedef float pairs[WIDTH];
static pairs *round_rows(pairs *out, float (*in)[WIDTH], int n) {
    (void)out, (void)n;
    return in;
}
static void round_columns(square x) { (void)x; }
static inline void multiply_rounded(float (*out)[WIDTH], int n, pairs *a, float (*b)[WIDTH],
                                    int add) {
    (add ? multiply_add : multiply)(out, n, a[0], WIDTH, 1, b, WIDTH);
}
#endif

/* WIDTH keys or values from a token on; zeros after the last. */
static void load_square(square out, const problem *p, const map *x, int64_t pair, int64_t first,
                        int turned) {
    int64_t tokens = p->height * p->width;
    memset(out, 0, sizeof(square));
    for (int64_t start = first; start < first + WIDTH && start < tokens; start += BLOCK) {
        int64_t stop = start + BLOCK < first + WIDTH ? start + BLOCK : first + WIDTH;
        stop = stop < tokens ? stop : tokens;
        piece c = {pair / p->heads, pair % p->heads, pair, start, stop};
        block part;
        load(part, x, &c, start, stop - start);
        if (turned) turn(part, part, p, start, stop - start, 1);
        memcpy(out[start - first], part, (stop - start) * sizeof part[0]);
    }
}

static void transpose(square out, square in) {
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) out[j][i] = in[i][j];
}

/* Fills keys (images * heads, blocks, channel, token) and values (images * heads, blocks, token,
 * channel), operands of the products; zeros after the last token. */
void pack(const problem *p, const map *k, const map *v, square *keys, square *values) {
    int64_t blocks = key_blocks(p);
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (int64_t index = 0; index < p->images * p->heads * blocks; index++) {
        int64_t pair = index / blocks, first = index % blocks * WIDTH;
        square rows;
        load_square(values[index], p, v, pair, first, 0);
        load_square(rows, p, k, pair, first, 1);
        transpose(keys[index], rows);
        round_columns(keys[index]);
        round_columns(values[index]);
    }
}

/* From scores to weights relative to the running maximum of each row; what was summed before fades. */
static void weigh(float (*scores)[WIDTH], float (*sums)[WIDTH], float *peak, float *total, int n) {
    for (int i = 0; i < n; i++) {
        float top = peak[i], sum = 0;
#pragma omp simd reduction(max : top)
        for (int j = 0; j < WIDTH; j++) top = scores[i][j] > top ? scores[i][j] : top;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < WIDTH; j++) {
            scores[i][j] = exponential(scores[i][j] - top);
            sum += scores[i][j];
        }
        if (top > peak[i]) {
            float fade = exponential(peak[i] - top);
            total[i] *= fade;
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) sums[i][j] *= fade;
            peak[i] = top;
        }
        total[i] += sum;
    }
}

/* Masks scores of tokens that are not there, from the key block b on. */
static void mask(block scores, const problem *p, int64_t b, int n) {
    for (int i = 0; i < n; i++)
        for (int64_t j = p->height * p->width - b * WIDTH; j < WIDTH; j++) scores[i][j] = MASKED;
}

/* y, and the logarithms of the sums of exponentials (images, heads, tokens); with a gate also
 * out = (y + lepe) gate, and y may be NULL. */
void attend(const problem *p, const map *q, square *keys, square *values, const map *y,
            float *logsumexp, const map *lepe, const map *gate, const map *out) {
    int64_t blocks = key_blocks(p), tokens = p->height * p->width;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads)
    for (int64_t index = 0; index < pieces(p); index++) {
        piece c = piece_of(p, index);
        int n = c.stop - c.start;
        block x, scores, sums;
        pairs memory[BLOCK] __attribute__((aligned(64))), *queries, *weights;
        float peak[BLOCK], total[BLOCK];
        memset(x, 0, sizeof x); /* products take rows by eight */
        memset(sums, 0, sizeof sums);
        load(x, q, &c, c.start, n);
        turn(x, x, p, c.start, n, 1);
        for (int i = 0; i < BLOCK; i++) {
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) x[i][j] *= p->scale;
            peak[i] = MASKED;
            total[i] = 0;
        }
        queries = round_rows((pairs *)x, x, BLOCK);
        for (int64_t b = 0; b < blocks; b++) {
            multiply_rounded(scores, n, queries, keys[c.pair * blocks + b], 0);
            mask(scores, p, b, n);
            weigh(scores, sums, peak, total, n);
            weights = round_rows(memory, scores, n);
            multiply_rounded(sums, n, weights, values[c.pair * blocks + b], 1);
        }
        for (int i = 0; i < n; i++) {
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) sums[i][j] /= total[i];
            logsumexp[c.pair * tokens + c.start + i] = peak[i] + log(total[i]);
        }
        if (y) store(y, &c, c.start, n, sums);
        if (!gate) continue;
        load(x, lepe, &c, c.start, n);
        load(scores, gate, &c, c.start, n);
        for (int i = 0; i < n; i++)
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) sums[i][j] = (sums[i][j] + x[i][j]) * scores[i][j];
        store(out, &c, c.start, n, sums);
    }
}

/* The backward pass, with weights w_ij = exp(s (R q_i) . (R k_j) - logsumexp_i), g = dL/dy and
 * e_i = g_i . y_i:
 *
 *     dv_j = sum_i w_ij g_i,  t_ij = w_ij (g_i . v_j - e_i),
 *     dq_i = s R^T sum_j t_ij R k_j,  dk_j = s R^T sum_i t_ij R q_i.
 *
 * First by queries: blocks of s R q and of g, zeros after the last token, and e; with a gate also
 * the gradients of the gate and of lepe, which is g. */
void prepare(const problem *p, const map *grad, const map *q, const map *y, const map *lepe,
             const map *gate, const map *dlepe, const map *dgate, block *queries, block *grads,
             float *corrections) {
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (int64_t index = 0; index < pieces(p); index++) {
        piece c = piece_of(p, index);
        int n = c.stop - c.start;
        float(*x)[WIDTH] = queries[index], (*g)[WIDTH] = grads[index];
        block u, w;
        memset(x, 0, sizeof(block));
        memset(g, 0, sizeof(block));
        load(x, q, &c, c.start, n);
        turn(x, x, p, c.start, n, 1);
        load(g, grad, &c, c.start, n);
        load(u, y, &c, c.start, n);
        if (gate) {
            load(w, lepe, &c, c.start, n);
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++) w[i][j] = (u[i][j] + w[i][j]) * g[i][j];
            store(dgate, &c, c.start, n, w);
            load(w, gate, &c, c.start, n);
            for (int i = 0; i < n; i++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++) g[i][j] *= w[i][j];
            store(dlepe, &c, c.start, n, g);
        }
        for (int i = 0; i < n; i++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < WIDTH; j++) {
                x[i][j] *= p->scale;
                sum += g[i][j] * u[i][j];
            }
            corrections[index * BLOCK + i] = sum;
        }
    }
}

/* Then by keys: dk, dv, and what each of the parts that they are cut into adds to the gradients of
 * the turned queries (parts, images * heads, blocks of queries). */
void differentiate(const problem *p, const map *k, const map *v, block *queries, block *grads,
                   const float *logsumexp, const float *corrections, const map *dk, const map *dv,
                   block *dqueries, int64_t parts) {
    int64_t blocks = key_blocks(p), tokens = p->height * p->width, pairs = p->images * p->heads;
    int64_t query_blocks = (tokens + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads)
    for (int64_t unit = 0; unit < parts * pairs; unit++) {
        int64_t part = unit / pairs, pair = unit % pairs;
        block *dq = dqueries + unit * query_blocks;
        square keys, keys_transposed, values, dkeys, dvalues;
        block w, t;
        memset(dq, 0, query_blocks * sizeof(block));
        memset(w, 0, sizeof w);
        memset(t, 0, sizeof t);
        for (int64_t b = blocks * part / parts; b < blocks * (part + 1) / parts; b++) {
            load_square(dvalues, p, v, pair, b * WIDTH, 0);
            transpose(values, dvalues);
            load_square(keys, p, k, pair, b * WIDTH, 1);
            transpose(keys_transposed, keys);
            memset(dkeys, 0, sizeof dkeys);
            memset(dvalues, 0, sizeof dvalues);
            for (int64_t i = 0; i < query_blocks; i++) {
                int n = tokens - i * BLOCK < BLOCK ? tokens - i * BLOCK : BLOCK;
                float(*x)[WIDTH] = queries[pair * query_blocks + i];
                float(*g)[WIDTH] = grads[pair * query_blocks + i];
                const float *lse = logsumexp + pair * tokens + i * BLOCK;
                const float *e = corrections + (pair * query_blocks + i) * BLOCK;
                multiply(w, n, x[0], WIDTH, 1, keys_transposed, WIDTH);
                mask(w, p, b, n);
                multiply(t, n, g[0], WIDTH, 1, values, WIDTH);
                for (int r = 0; r < n; r++)
#pragma omp simd
                    for (int j = 0; j < WIDTH; j++) {
                        w[r][j] = exponential(w[r][j] - lse[r]);
                        t[r][j] = w[r][j] * (t[r][j] - e[r]);
                    }
                multiply_add(dvalues, WIDTH, w[0], 1, WIDTH, g, n);
                multiply_add(dkeys, WIDTH, t[0], 1, WIDTH, x, n);
                multiply_add(dq[i], n, t[0], WIDTH, 1, keys, WIDTH);
            }
            for (int64_t start = b * WIDTH; start < (b + 1) * WIDTH && start < tokens;
                 start += BLOCK) {
                int64_t stop = start + BLOCK < (b + 1) * WIDTH ? start + BLOCK : (b + 1) * WIDTH;
                stop = stop < tokens ? stop : tokens;
                piece c = {pair / p->heads, pair % p->heads, pair, start, stop};
                store(dv, &c, start, stop - start, dvalues + (start - b * WIDTH));
                turn(w, dkeys + (start - b * WIDTH), p, start, stop - start, -1);
                store(dk, &c, start, stop - start, w);
            }
        }
    }
}

/* Last by queries again: dq from what the parts added. */
void add_parts(const problem *p, block *dqueries, const map *dq, int64_t parts) {
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (int64_t index = 0; index < pieces(p); index++) {
        piece c = piece_of(p, index);
        int n = c.stop - c.start;
        block sum;
        for (int i = 0; i < n; i++)
            for (int64_t part = 0; part < parts; part++)
#pragma omp simd
                for (int j = 0; j < WIDTH; j++)
                    sum[i][j] = (part ? sum[i][j] : 0) +
                                p->scale * dqueries[part * pieces(p) + index][i][j];
        turn(sum, sum, p, c.start, n, -1);
        store(dq, &c, c.start, n, sum);
    }
}
