/* Tokens of images and heads in blocks of float32, for one head width (WIDTH): reading and writing
 * them, the rotary embedding, and products of matrices. */
#include <math.h>
#include <string.h>

#include "element.h"

#define HALF (WIDTH / 2)
#define QUARTER (WIDTH / 4)
#define BLOCK 64

typedef float block[BLOCK][WIDTH] __attribute__((aligned(64)));

/* An input or output (image, head, token, channel): data and strides in elements. */
typedef struct {
    element *data;
    int64_t image, head, token, channel;
} map;

typedef struct {
    int64_t images, heads, height, width, chunk, threads;
    int kind, rotary;
    float scale, eps;
    const float *row_cos, *row_sin, *column_cos, *column_sin; /* (length, QUARTER) each */
} problem;

/* A chunk of tokens of one image and head. */
typedef struct {
    int64_t image, head, pair, start, stop;
} piece;

static int64_t pieces(const problem *p) {
    int64_t tokens = p->height * p->width;
    return p->images * p->heads * ((tokens + p->chunk - 1) / p->chunk);
}

static piece piece_of(const problem *p, int64_t index) {
    int64_t tokens = p->height * p->width, chunks = (tokens + p->chunk - 1) / p->chunk;
    piece c;
    c.pair = index / chunks;
    c.image = c.pair / p->heads;
    c.head = c.pair % p->heads;
    c.start = index % chunks * p->chunk;
    c.stop = c.start + p->chunk < tokens ? c.start + p->chunk : tokens;
    return c;
}

static element *at(const map *x, const piece *c, int64_t token) {
    return x->data + c->image * x->image + c->head * x->head + token * x->token;
}

static void load(block out, const map *x, const piece *c, int64_t token, int n) {
    const element *data = at(x, c, token);
    if (x->channel == 1)
        for (int i = 0; i < n; i++)
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) out[i][j] = widen(data[i * x->token + j]);
    else
        for (int j = 0; j < WIDTH; j++)
            for (int i = 0; i < n; i++) out[i][j] = widen(data[i * x->token + j * x->channel]);
}

static void store(const map *x, const piece *c, int64_t token, int n, block in) {
    element *data = at(x, c, token);
    if (x->channel == 1)
        for (int i = 0; i < n; i++)
#pragma omp simd
            for (int j = 0; j < WIDTH; j++) data[i * x->token + j] = narrow(in[i][j]);
    else
        for (int j = 0; j < WIDTH; j++)
            for (int i = 0; i < n; i++) data[i * x->token + j * x->channel] = narrow(in[i][j]);
}

/* The rotary embedding: adjacent channels turn by the row in the first half, else by the column.
 * A negative direction turns back. In place if out is in. */
static void turn(block out, block in, const problem *p, int64_t token, int n, float direction) {
    if (!p->rotary) {
        if (out != in) memcpy(out, in, n * sizeof in[0]);
        return;
    }
    int64_t row = token / p->width, column = token % p->width;
    for (int i = 0; i < n; i++) {
        const float *cosines[2] = {p->row_cos + row * QUARTER, p->column_cos + column * QUARTER};
        const float *sines[2] = {p->row_sin + row * QUARTER, p->column_sin + column * QUARTER};
        for (int half = 0; half < 2; half++) {
            const float *x = in[i] + half * HALF, *cosine = cosines[half], *sine = sines[half];
            float *y = out[i] + half * HALF;
#pragma omp simd
            for (int m = 0; m < QUARTER; m++) {
                float even = x[2 * m], odd = x[2 * m + 1], s = direction * sine[m];
                y[2 * m] = even * cosine[m] - odd * s;
                y[2 * m + 1] = odd * cosine[m] + even * s;
            }
        }
        if (++column == p->width) column = 0, row++;
    }
}

/* out[i] = sum_k a(i, k) b[k], added to what is there if add, where
 * a(i, k) = a[i * rows + k * columns]. Rows are taken by TALL:
 * n is rounded up. Registers hold the sums of TALL rows and WIDE vectors over DEEP terms: adding
 * these up apart from each other rounds less. */
#ifndef DEEP
#define DEEP 16
#endif
#if defined __AVX512F__
enum { LANES = 16, TALL = 8, WIDE = 2 };
#elif defined __AVX__
enum { LANES = 8, TALL = 4, WIDE = 2 };
#else
enum { LANES = 4, TALL = 4, WIDE = 2 };
#endif
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline __attribute__((always_inline)) void product(float (*out)[WIDTH], int n,
                                                          const float *a, int rows, int columns,
                                                          const float (*b)[WIDTH], int depth,
                                                          int add) {
    for (int j = 0; j < WIDTH; j += LANES * WIDE)
        for (int i = 0; i < n; i += TALL)
            for (int first = 0; first < depth; first += DEEP) {
                int last = first + DEEP < depth ? first + DEEP : depth;
                vector sum[TALL][WIDE] = {0};
                for (int k = first; k < last; k++)
#pragma GCC unroll 8
                    for (int r = 0; r < TALL; r++)
#pragma GCC unroll 2
                        for (int c = 0; c < WIDE; c++)
                            sum[r][c] += a[(i + r) * rows + k * columns] *
                                         *(const vector *)&b[k][j + LANES * c];
#pragma GCC unroll 8
                for (int r = 0; r < TALL; r++)
#pragma GCC unroll 2
                    for (int c = 0; c < WIDE; c++)
                    {
                        vector *to = (vector *)&out[i + r][j + LANES * c];
                        if (add || first) sum[r][c] += *to;
                        *to = sum[r][c];
                    }
            }
}

static void multiply(float (*out)[WIDTH], int n, const float *a, int rows, int columns,
                     const float (*b)[WIDTH], int depth) {
    product(out, n, a, rows, columns, b, depth, 0);
}

static void multiply_add(float (*out)[WIDTH], int n, const float *a, int rows, int columns,
                         const float (*b)[WIDTH], int depth) {
    product(out, n, a, rows, columns, b, depth, 1);
}
