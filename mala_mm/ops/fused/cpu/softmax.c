/* Softmax attention with the rotary embedding, computed in float32, for one head width (WIDTH) and
 * one type of the inputs and outputs (FLOAT32, BFLOAT16 or FLOAT16).
 *
 * Keys are turned and transposed, values copied, into blocks of WIDTH tokens once; then every block
 * of queries walks over them with a running maximum (p->chunk is BLOCK: a piece is such a block).
 * Scores never leave the cache.
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

/* Fills keys (images * heads, blocks, channel, token) and values (images * heads, blocks, token,
 * channel); zeros after the last token. */
void pack(const problem *p, const map *k, const map *v, square *keys, square *values) {
    int64_t blocks = key_blocks(p), tokens = p->height * p->width;
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (int64_t index = 0; index < p->images * p->heads * blocks; index++) {
        int64_t pair = index / blocks, first = index % blocks * WIDTH;
        memset(values[index], 0, sizeof(square));
        memset(keys[index], 0, sizeof(square));
        for (int64_t start = first; start < first + WIDTH && start < tokens; start += BLOCK) {
            int64_t stop = start + BLOCK < first + WIDTH ? start + BLOCK : first + WIDTH;
            stop = stop < tokens ? stop : tokens;
            piece c = {pair / p->heads, pair % p->heads, pair, start, stop};
            block x;
            load(x, v, &c, start, stop - start);
            memcpy(values[index][start - first], x, (stop - start) * sizeof x[0]);
            load(x, k, &c, start, stop - start);
            turn(x, x, p, start, stop - start, 1);
            for (int i = 0; i < stop - start; i++)
                for (int j = 0; j < WIDTH; j++) keys[index][j][start - first + i] = x[i][j];
        }
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

/* out, and the logarithms of the sums of exponentials (images, heads, tokens). */
void attend(const problem *p, const map *q, square *keys, square *values, const map *out,
            float *logsumexp) {
    int64_t blocks = key_blocks(p), tokens = p->height * p->width;
#pragma omp parallel for schedule(dynamic) num_threads(p->threads)
    for (int64_t index = 0; index < pieces(p); index++) {
        piece c = piece_of(p, index);
        int n = c.stop - c.start;
        block x, scores, sums;
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
        for (int64_t b = 0; b < blocks; b++) {
            int64_t present = tokens - b * WIDTH;
            memset(scores, 0, sizeof scores);
            multiply(scores, n, x[0], WIDTH, 1, keys[c.pair * blocks + b], WIDTH);
            for (int i = 0; i < n; i++)
                for (int64_t j = present; j < WIDTH; j++) scores[i][j] = MASKED;
            weigh(scores, sums, peak, total, n);
            multiply(sums, n, scores[0], WIDTH, 1, values[c.pair * blocks + b], WIDTH);
        }
        for (int i = 0; i < n; i++) {
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) sums[i][j] /= total[i];
            logsumexp[c.pair * tokens + c.start + i] = peak[i] + log(total[i]);
        }
        store(out, &c, c.start, n, sums);
    }
}

/* out = R x, or back for a direction of -1. */
void turn_all(const problem *p, const map *x, const map *out, float direction) {
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (int64_t index = 0; index < pieces(p); index++) {
        piece c = piece_of(p, index);
        block y;
        load(y, x, &c, c.start, c.stop - c.start);
        turn(y, y, p, c.start, c.stop - c.start, direction);
        store(out, &c, c.start, c.stop - c.start, y);
    }
}
